// Package validate refuses ShardingConfigs, and objects of the dialects, that cannot
// work, with a message that says what to change. Config and Overlap are pure; Webhook
// is their admission.
package validate

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"

	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/inject"
	"github.com/ctrlmesh/ctrlmesh/manager/internal/bounds"
	"github.com/ctrlmesh/ctrlmesh/manager/internal/invalid"
	"github.com/ctrlmesh/ctrlmesh/manager/label"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
	"github.com/ctrlmesh/ctrlmesh/manager/metrics"
	"github.com/ctrlmesh/ctrlmesh/manager/origin"
	"github.com/ctrlmesh/ctrlmesh/manager/platform"
	"github.com/ctrlmesh/ctrlmesh/manager/resources"
)

// Path at which Webhook is served.
const Path = "/validate-shardingconfig"

const kind = "shardingconfig" // in metrics

// Webhook is the admission of ShardingConfigs.
type Webhook struct {
	// Reader reads without a cache, so that new objects count.
	Reader client.Reader
	// Manager is the manager's user name. Only this user may write derived shards.
	Manager string
	// Namespace of the mesh.
	Namespace string
	// Settings returns the administrator's settings.
	Settings func() *platform.Settings
	// Unknown returns what is wrong with the names of resources that the apiserver does not
	// serve; empty if it serves all. It may be nil.
	Unknown func([]v1alpha1.ResourceGroup) resources.Unknown
	// Translate returns an object of a dialect as a ShardingConfig, with warnings for its author
	// and its errors; nil for objects of other kinds. It may be nil.
	Translate func(kind schema.GroupVersionKind, namespace string, raw []byte) (*v1alpha1.ShardingConfig, []string, field.ErrorList, error)
}

// Handle implements admission.Handler. It judges objects of the dialects by what they stand for.
func (w *Webhook) Handle(ctx context.Context, req admission.Request) admission.Response {
	c, warned, errs, err := w.decode(req, req.Object)
	if err != nil {
		return admission.Errored(http.StatusBadRequest, err)
	}
	var old *v1alpha1.ShardingConfig
	if req.Operation == admissionv1.Update {
		if old, _, _, err = w.decode(req, req.OldObject); err != nil {
			return admission.Errored(http.StatusBadRequest, err)
		}
	}
	if req.UserInfo.Username != w.Manager {
		if msg := meddling(old, c); msg != "" {
			return refuse(kind, "Derived", msg)
		}
	}
	if c.DeletionTimestamp != nil || req.UserInfo.Username == w.Manager {
		if old != nil && equality.Semantic.DeepEqual(old.Spec, c.Spec) {
			return admission.Allowed("") // finalizers: an invalid object needs them, too
		}
	}
	if compile.Derived(c) {
		return admission.Allowed("") // a derived shard is as valid as its root
	}
	if len(errs) > 0 {
		return refuse(kind, "Invalid", invalid.Message(errs))
	}
	if refused := w.check(ctx, old, c); refused != nil {
		return *refused
	}
	return admission.Allowed("").WithWarnings(append(warned, w.warnings(c)...)...)
}

// decode reads an object of any kind. warned and errs are those of its translation.
func (w *Webhook) decode(req admission.Request, raw runtime.RawExtension) (c *v1alpha1.ShardingConfig, warned []string, errs field.ErrorList, err error) {
	if w.Translate != nil {
		if c, warned, errs, err = w.Translate(schema.GroupVersionKind(req.Kind), req.Namespace, raw.Raw); c != nil || err != nil {
			return c, warned, errs, err
		}
	}
	c = &v1alpha1.ShardingConfig{}
	err = bounds.Unmarshal(v1alpha1.GroupName+"_shardingconfigs", raw.Raw, c)
	c.Namespace = req.Namespace
	return c, nil, nil, err
}

// warnings returns what the author of a valid configuration may not expect.
func (w *Webhook) warnings(c *v1alpha1.ShardingConfig) (out []string) {
	if c.Spec.FailurePolicy == v1alpha1.FailOpen && !compile.PassesThrough(c) {
		out = append(out, "spec.failurePolicy: Open lets members run unsharded while no agent serves their node: two shards may then write the same objects")
	}
	if shared := layout.Exclude(c.Spec.DeepCopy(), w.Settings().Undivided()); len(shared) > 0 {
		names := collect.Map(shared, schema.GroupResource.String)
		out = append(out, fmt.Sprintf("the mesh or its administrator excludes %s from division: every subset reads and writes these resources", strings.Join(names, ", ")))
	}
	if w.Unknown != nil {
		if u := w.Unknown(label.Divided(c)); u.Message != "" {
			out = append(out, u.Message+"; until it is, nothing is granted by this spec")
		}
	}
	return out
}

// check refuses a configuration that is invalid, exceeds the settings, or conflicts with others.
func (w *Webhook) check(ctx context.Context, old, c *v1alpha1.ShardingConfig) *admission.Response {
	if errs := Config(c); len(errs) > 0 {
		return new(refuse(kind, "Invalid", invalid.Message(errs)))
	}
	// A configuration that exceeds newer settings can still be labelled, and deleted.
	if old == nil || !equality.Semantic.DeepEqual(old.Spec, c.Spec) {
		if msg := permitted(c, w.Settings(), w.Namespace); msg != "" {
			return new(refuse(kind, "Platform", msg))
		}
	}
	return w.among(ctx, old, c)
}

// among refuses a configuration that conflicts with others of its namespace.
func (w *Webhook) among(ctx context.Context, old, c *v1alpha1.ShardingConfig) *admission.Response {
	var all v1alpha1.ShardingConfigList
	if err := w.Reader.List(ctx, &all, client.InNamespace(c.Namespace)); err != nil {
		return new(admission.Errored(http.StatusInternalServerError, fmt.Errorf("listing ShardingConfigs: %w", err)))
	}
	others := slices.DeleteFunc(all.Items, func(o v1alpha1.ShardingConfig) bool { return origin.Of(&o) == origin.Of(c) })
	msg, err := newly(old, c, func(c *v1alpha1.ShardingConfig) (string, error) { return otherKind(c, others), nil })
	if refused := compared("Kind", msg, err); refused != nil {
		return refused
	}
	if msg := sameLock(c, others); msg != "" {
		return new(refuse(kind, "LockCollision", msg))
	}
	// Existing overlaps can be fixed step by step.
	msg, err = newly(old, c, func(c *v1alpha1.ShardingConfig) (string, error) { return divided(ctx, c, others) })
	if refused := compared("TwoOwners", msg, err); refused != nil {
		return refused
	}
	if old != nil && old.Spec.Root == nil && old.Spec.Selector != nil {
		return nil // the selector cannot change
	}
	var pods corev1.PodList
	if err := w.Reader.List(ctx, &pods, client.InNamespace(c.Namespace), client.MatchingLabels{v1alpha1.EnableProxyLabel: "true"}); err != nil {
		return new(admission.Errored(http.StatusInternalServerError, fmt.Errorf("listing pods: %w", err)))
	}
	if msg := rooted(c, others, pods.Items); msg != "" && (old == nil || rooted(old, others, pods.Items) == "") {
		return new(refuse(kind, "Root", msg))
	}
	msg, err = newly(old, c, func(c *v1alpha1.ShardingConfig) (string, error) { return overlapping(ctx, c, others, pods.Items) })
	return compared("Overlap", msg, err)
}

// compared returns the refusal for the result of a comparison; nil if it found nothing.
func compared(reason, msg string, err error) *admission.Response {
	switch {
	case err != nil:
		return new(admission.Errored(http.StatusServiceUnavailable, fmt.Errorf("comparing with other ShardingConfigs: %w", err)))
	case msg != "":
		return new(refuse(kind, reason, msg))
	}
	return nil
}

// newly returns what a check finds, unless the check finds something in the old object too.
func newly(old, c *v1alpha1.ShardingConfig, check func(*v1alpha1.ShardingConfig) (string, error)) (string, error) {
	msg, err := check(c)
	if msg == "" || err != nil || old == nil {
		return msg, err
	}
	if before, err := check(old); before != "" || err != nil {
		return "", err
	}
	return msg, nil
}

func refuse(kind, reason, msg string) admission.Response {
	metrics.AdmissionRefusals.WithLabelValues(kind, reason).Inc()
	return admission.Denied(msg)
}

// otherKind finds a configuration of another kind that has the same name or lock. The manager
// would confuse their shards.
func otherKind(c *v1alpha1.ShardingConfig, others []v1alpha1.ShardingConfig) string {
	for _, o := range others {
		if origin.KindOf(&o) == origin.KindOf(c) || compile.Derived(&o) {
			continue
		}
		if o.Name == c.Name {
			return fmt.Sprintf("metadata.name: %s has this name too: choose another one", origin.Describe(&o))
		}
		for _, l := range compile.NamedLocks(c) {
			if slices.Contains(compile.NamedLocks(&o), l) {
				return fmt.Sprintf("lock %s is also that of %s: objects of different kinds cannot share a lock, so delete that one first", l, origin.Describe(&o))
			}
		}
	}
	return ""
}

// sameLock finds another shard whose lock would have the same name.
func sameLock(c *v1alpha1.ShardingConfig, others []v1alpha1.ShardingConfig) string {
	mine := sets.New(locks(c)...)
	for _, o := range others {
		if o.Labels[v1alpha1.RootLabel] == c.Name {
			continue // its own shard
		}
		for _, name := range locks(&o) {
			if mine.Has(name) {
				return fmt.Sprintf("%s: the shard lock would be %s, which is also the lock of %s: give this object another name",
					field.NewPath("spec", "controller", "leaderElectionName"), name, origin.Describe(&o))
			}
		}
	}
	return ""
}

// locks returns the names of the shard locks of a configuration.
func locks(c *v1alpha1.ShardingConfig) (names []string) {
	shards := []string{c.Name}
	if c.Spec.Root != nil {
		shards = collect.Map(layout.Shards(c.Spec.Root), func(s layout.Shard) string { return s.Name })
	}
	for _, l := range compile.NamedLocks(c) {
		for _, shard := range shards {
			names = append(names, l.Namespace+"/"+compile.UpstreamLock(l.Name, shard))
		}
	}
	return names
}

// overlapping finds another shard that selects a pod which this one selects. The pod exists, or
// could exist because both selectors have a label key in common. Selectors without a common key
// are allowed until a pod matches both.
func overlapping(ctx context.Context, c *v1alpha1.ShardingConfig, others []v1alpha1.ShardingConfig, pods []corev1.Pod) (string, error) {
	mine, ok := members(c)
	if !ok {
		return "", nil
	}
	selected := slices.DeleteFunc(slices.Clone(pods), func(p corev1.Pod) bool { return compile.Ended(&p) || !mine.matches(p.Labels) })
	for _, o := range others {
		if err := ctx.Err(); err != nil {
			return "", err
		}
		theirs, ok := members(&o)
		if !ok {
			continue
		}
		for _, p := range selected {
			if theirs.matches(p.Labels) {
				return fmt.Sprintf("%s: pod %s is selected by this and by %s, but a pod belongs to one shard: narrow this selector so that it leaves the pod out",
					selectorOf(c), p.Name, origin.Describe(&o)), nil
			}
		}
		shared := sharedKeys(mine, theirs)
		if len(shared) == 0 {
			continue
		}
		both := maps.Clone(theirs)
		both.merge(mine)
		if example, ok := both.satisfy(); ok {
			return fmt.Sprintf("%s: a pod with labels {%s} would be selected by this and by %s, but a pod belongs to one shard: make the selectors exclude each other, for instance by different values of %s",
				selectorOf(c), example, origin.Describe(&o), strings.Join(shared, " or ")), nil
		}
	}
	return "", nil
}

// selectorOf returns the path of the selector in an object.
func selectorOf(c *v1alpha1.ShardingConfig) string {
	if c.Spec.Root != nil && origin.IsNative(c) {
		return "spec.root.targetSelector"
	}
	return "spec.selector"
}

// members returns the conditions on the pods of a configuration that selects them by label.
func members(c *v1alpha1.ShardingConfig) (conditions, bool) {
	selector, _ := compile.Members(c)
	if root := c.Spec.Root; root != nil && root.TargetSelector != nil && !compile.Derived(c) {
		selector, _ = metav1.LabelSelectorAsSelector(root.TargetSelector) // Config reports the error
	}
	if selector == nil {
		return nil, false
	}
	return conditionsOf(selector)
}

// permitted returns a message if a configuration exceeds a setting of the administrator. The
// settings are in the mesh's namespace.
func permitted(c *v1alpha1.ShardingConfig, s *platform.Settings, meshNamespace string) string {
	exceeds := func(setting, format string, args ...any) string {
		return fmt.Sprintf(format, args...) + fmt.Sprintf(": %s of ConfigMap %s/%s excludes it; ask the administrator of the mesh", setting, meshNamespace, platform.ConfigMap)
	}
	if origin.KindOf(c) == origin.VirtualApp && !inject.EntriesIn(c.Namespace, meshNamespace) {
		return "metadata.namespace: its selector puts pods on the mesh, which those of the mesh itself cannot be, and those of kube-system by their own label alone: choose another namespace"
	}
	if !s.ConfigsIn(c.Namespace) {
		return exceeds(platform.ShardingNamespaces, "metadata.namespace: namespace %s may have no ShardingConfig", c.Namespace)
	}
	for _, l := range label.Limits(c) {
		for _, gr := range label.Resources(l.RelateResources) {
			// Subsets share what their "*" includes and must not divide.
			wide := c.Spec.Root != nil && layout.ByLabels(c.Spec.Root) && layout.Wide(gr)
			if !wide && !s.Divides(gr) {
				return exceeds(platform.ShardingExcludedResources, "%s may not be divided", gr)
			}
			if label.Needed(c, l) && !s.Stamps(gr) {
				return exceeds(platform.StampingExcludedResources, "%s may not be divided by the mesh's labels, because its objects are not stamped", gr)
			}
		}
		for _, namespace := range namespacesOf(l.Selector) {
			if namespace == meshNamespace || !s.StampsIn(namespace) {
				return exceeds(platform.StampingExcludedNamespaces, "objects of namespace %s may not be selected by label %s, because they are not stamped", namespace, v1alpha1.NamespaceLabel)
			}
		}
	}
	return ""
}

// namespacesOf returns the namespaces that a selector requires by label.
func namespacesOf(s *metav1.LabelSelector) (out []string) {
	if s == nil {
		return nil
	}
	if namespace, ok := s.MatchLabels[v1alpha1.NamespaceLabel]; ok {
		out = append(out, namespace)
	}
	for _, e := range s.MatchExpressions {
		if e.Key == v1alpha1.NamespaceLabel && e.Operator == metav1.LabelSelectorOpIn {
			out = slices.Concat(out, e.Values)
		}
	}
	return out
}
