// Package validate refuses ShardingConfigs that cannot work, with a message that
// says what to change. Config and Overlap are pure; Webhook is their admission.
package validate

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"

	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/manager/label"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
	"github.com/ctrlmesh/ctrlmesh/manager/metrics"
	"github.com/ctrlmesh/ctrlmesh/manager/platform"
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
}

// Handle implements admission.Handler.
func (w *Webhook) Handle(ctx context.Context, req admission.Request) admission.Response {
	c := &v1alpha1.ShardingConfig{}
	if err := json.Unmarshal(req.Object.Raw, c); err != nil {
		return admission.Errored(http.StatusBadRequest, err)
	}
	c.Namespace = req.Namespace
	var old *v1alpha1.ShardingConfig
	if req.Operation == admissionv1.Update {
		old = &v1alpha1.ShardingConfig{}
		if err := json.Unmarshal(req.OldObject.Raw, old); err != nil {
			return admission.Errored(http.StatusBadRequest, err)
		}
	}
	if req.UserInfo.Username != w.Manager {
		if msg := meddling(old, c); msg != "" {
			return refuse(kind, "Derived", msg)
		}
	}
	if c.DeletionTimestamp != nil || compile.Derived(c) {
		return admission.Allowed("") // so that finalizers can be removed; a derived shard is as valid as its root
	}
	if refused := w.check(ctx, old, c); refused != nil {
		return *refused
	}
	allowed := admission.Allowed("")
	if c.Spec.FailurePolicy == v1alpha1.FailOpen && !compile.PassesThrough(c) {
		allowed = allowed.WithWarnings("spec.failurePolicy: Open lets members run unsharded while no agent serves their node: two shards may then write the same objects")
	}
	return allowed
}

// check refuses a configuration that is invalid, exceeds the settings, or conflicts with others.
func (w *Webhook) check(ctx context.Context, old, c *v1alpha1.ShardingConfig) *admission.Response {
	errs := Config(c)
	if old != nil {
		errs = append(errs, Update(old, c)...)
	}
	if len(errs) > 0 {
		return new(refuse(kind, "Invalid", errs.ToAggregate().Error()))
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
	others := slices.DeleteFunc(all.Items, func(o v1alpha1.ShardingConfig) bool { return o.Name == c.Name })
	if msg := sameLock(c, others); msg != "" {
		return new(refuse(kind, "LockCollision", msg))
	}
	// Existing overlaps can be fixed step by step.
	msg, err := newly(old, c, func(c *v1alpha1.ShardingConfig) (string, error) { return divided(ctx, c, others) })
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
	msg, err = overlapping(ctx, c, others, pods.Items)
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

// sameLock finds another shard whose lock would have the same name.
func sameLock(c *v1alpha1.ShardingConfig, others []v1alpha1.ShardingConfig) string {
	mine := locks(c)
	for _, o := range others {
		if o.Labels[v1alpha1.RootLabel] == c.Name {
			continue // its own shard
		}
		for _, name := range locks(&o) {
			if slices.Contains(mine, name) {
				return fmt.Sprintf("%s: the shard lock would be %s, which is also the lock of ShardingConfig %s: give this object another name",
					field.NewPath("spec", "controller", "leaderElectionName"), name, o.Name)
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
				return fmt.Sprintf("spec.selector: pod %s is selected by this and by ShardingConfig %s, but a pod belongs to one shard: narrow this selector so that it leaves the pod out",
					p.Name, o.Name), nil
			}
		}
		shared := sharedKeys(mine, theirs)
		if len(shared) == 0 {
			continue
		}
		both := maps.Clone(theirs)
		both.merge(mine)
		if example, ok := both.satisfy(); ok {
			return fmt.Sprintf("spec.selector: a pod with labels {%s} would be selected by this and by ShardingConfig %s, but a pod belongs to one shard: make the selectors exclude each other, for instance by different values of %s",
				example, o.Name, strings.Join(shared, " or ")), nil
		}
	}
	return "", nil
}

// members returns the conditions on the pods of a hand-written configuration.
func members(c *v1alpha1.ShardingConfig) (conditions, bool) {
	selector, _ := compile.Members(c)
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
	if !s.ConfigsIn(c.Namespace) {
		return exceeds(platform.ShardingNamespaces, "metadata.namespace: namespace %s may have no ShardingConfig", c.Namespace)
	}
	for _, l := range label.Limits(c) {
		for _, gr := range label.Resources(l.RelateResources) {
			if !s.Divides(gr) {
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
