package validate

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"

	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
	"github.com/ctrlmesh/ctrlmesh/manager/metrics"
)

// Path at which Webhook is served.
const Path = "/validate-shardingconfig"

const kind = "shardingconfig" // in metrics

// Webhook is the admission of ShardingConfigs.
type Webhook struct {
	// Reader reads without a cache: what was created a moment ago counts.
	Reader client.Reader
	// Manager is the manager's user name: the one that may write derived shards.
	Manager string
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
		return admission.Allowed("") // let finalizers go; a derived shard is as good as its root
	}
	errs := Config(c)
	if old != nil {
		errs = append(errs, Update(old, c)...)
	}
	if len(errs) > 0 {
		return refuse(kind, "Invalid", errs.ToAggregate().Error())
	}

	var all v1alpha1.ShardingConfigList
	if err := w.Reader.List(ctx, &all, client.InNamespace(c.Namespace)); err != nil {
		return admission.Errored(http.StatusInternalServerError, fmt.Errorf("listing ShardingConfigs: %w", err))
	}
	others := slices.DeleteFunc(all.Items, func(o v1alpha1.ShardingConfig) bool { return o.Name == c.Name })
	if msg := sameLock(c, others); msg != "" {
		return refuse(kind, "LockCollision", msg)
	}
	// What overlapped before can be mended step by step.
	if msg := divided(c, others); msg != "" && (old == nil || divided(old, others) == "") {
		return refuse(kind, "TwoOwners", msg)
	}
	allowed := admission.Allowed("")
	if c.Spec.FailurePolicy == v1alpha1.FailOpen && !compile.PassesThrough(c) {
		allowed = allowed.WithWarnings("spec.failurePolicy: Open lets members run unsharded while no agent serves their node: two shards may then write the same objects")
	}
	if old != nil && old.Spec.Root == nil && old.Spec.Selector != nil {
		return allowed // it selects what it did
	}
	var pods corev1.PodList
	if err := w.Reader.List(ctx, &pods, client.InNamespace(c.Namespace), client.MatchingLabels{v1alpha1.EnableProxyLabel: "true"}); err != nil {
		return admission.Errored(http.StatusInternalServerError, fmt.Errorf("listing pods: %w", err))
	}
	if msg := rooted(c, others, pods.Items); msg != "" && (old == nil || rooted(old, others, pods.Items) == "") {
		return refuse(kind, "Root", msg)
	}
	if msg := overlapping(c, others, pods.Items); msg != "" {
		return refuse(kind, "Overlap", msg)
	}
	return allowed
}

func refuse(kind, reason, msg string) admission.Response {
	metrics.AdmissionRefusals.WithLabelValues(kind, reason).Inc()
	return admission.Denied(msg)
}

// sameLock finds another shard that would hold its lock under the same name.
func sameLock(c *v1alpha1.ShardingConfig, others []v1alpha1.ShardingConfig) string {
	mine := locks(c)
	for _, o := range others {
		if o.Labels[v1alpha1.RootLabel] == c.Name {
			continue // its own shard
		}
		for _, name := range locks(&o) {
			if slices.Contains(mine, name) {
				return fmt.Sprintf("%s: the lock would be held as %s, the name under which ShardingConfig %s holds its own: give this object another name",
					field.NewPath("spec", "controller", "leaderElectionName"), name, o.Name)
			}
		}
	}
	return ""
}

// locks are the names under which the shards of a configuration hold theirs.
func locks(c *v1alpha1.ShardingConfig) (names []string) {
	switch ctl := c.Spec.Controller; {
	case ctl == nil:
	case c.Spec.Root == nil:
		names = append(names, compile.UpstreamLock(ctl.LeaderElectionName, c.Name))
	default:
		for _, s := range layout.Shards(c.Spec.Root) {
			names = append(names, compile.UpstreamLock(ctl.LeaderElectionName, s.Name))
		}
	}
	return names
}

// overlapping finds another shard that selects a pod which this one selects:
// one that runs, or one that might, judging by a label key that both speak of.
// Selectors without a common key are let pass until a pod matches both.
func overlapping(c *v1alpha1.ShardingConfig, others []v1alpha1.ShardingConfig, pods []corev1.Pod) string {
	mine, _ := compile.Members(c)
	if mine == nil {
		return ""
	}
	for _, o := range others {
		theirs, _ := compile.Members(&o)
		if theirs == nil {
			continue
		}
		for _, p := range pods {
			if set := labels.Set(p.Labels); !compile.Ended(&p) && mine.Matches(set) && theirs.Matches(set) {
				return fmt.Sprintf("spec.selector: pod %s is selected by this and by ShardingConfig %s, but a pod belongs to one shard: narrow this selector so that it leaves the pod out",
					p.Name, o.Name)
			}
		}
		shared := SharedKeys(mine, theirs)
		if len(shared) == 0 {
			continue
		}
		if example, ok := Overlap(mine, theirs); ok {
			return fmt.Sprintf("spec.selector: a pod with labels {%s} would be selected by this and by ShardingConfig %s (%s), but a pod belongs to one shard: make the selectors exclude each other, for instance by different values of %s",
				example, o.Name, theirs, strings.Join(shared, " or "))
		}
	}
	return ""
}
