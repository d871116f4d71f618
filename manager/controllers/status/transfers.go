package status

import (
	"cmp"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/controllers"
	"github.com/ctrlmesh/ctrlmesh/manager/transfer"
)

// transfers is what hand-written configurations wait for before they take objects.
type transfers struct {
	*controllers.Compiled
	// current has the configurations that are as they were compiled.
	current map[types.UID]bool
	// unconfirmed describes a pod of each configuration that has not confirmed its policy.
	unconfirmed map[types.UID]string
	// strays describes a pod of each namespace that belongs to no configuration any more, and
	// has not confirmed that it is refused. The namespace is empty if it is not known.
	strays map[string]string
}

// transfers finds the pods that have not confirmed their policies, if a configuration waits for any.
func (r *Controller) transfers(c *controllers.Compiled, newest map[types.UID]*writtenStatus) transfers {
	out := transfers{c, map[types.UID]bool{}, map[types.UID]string{}, map[string]string{}}
	if c.Acting.Complete() {
		return out
	}
	for _, config := range c.Configs {
		last := newest[config.UID]
		out.current[config.UID] = last != nil && equality.Semantic.DeepEqual(config.Status.Acting, last.object.Status.Acting)
	}
	member := map[types.UID]bool{}
	for _, s := range c.Shards {
		for _, pod := range s.Members {
			member[pod.UID] = true
			if s.Config != nil && s.Config.Spec.Root == nil && out.unconfirmed[s.Config.UID] == "" {
				out.unconfirmed[s.Config.UID] = r.unconfirmed(c, pod)
			}
		}
	}
	for _, pod := range c.Pods {
		if !member[pod.UID] && c.Policies[pod.UID].GetRefuse() != "" {
			out.strays[pod.Namespace] = cmp.Or(out.strays[pod.Namespace], r.unconfirmed(c, pod))
		}
	}
	for _, p := range r.Push.Removed() {
		if !p.Over(time.Now(), r.State.RequestTimeout()) {
			out.strays[p.Namespace] = cmp.Or(out.strays[p.Namespace], fmt.Sprintf("a pod with uid %s, which was deleted and may still run on node %s", p.UID, p.Node))
		}
	}
	return out
}

// unconfirmed describes a pod that has not confirmed its policy; empty if it has.
func (r *Controller) unconfirmed(c *controllers.Compiled, pod *corev1.Pod) string {
	policy := c.Policies[pod.UID]
	if policy.Node == "" || policy.PodPolicy == nil { // it does not run
		return ""
	}
	switch o := r.Push.Observe(policy.Node, string(pod.UID)); {
	case o.Version == policy.Version:
		return ""
	case !o.Connected:
		return fmt.Sprintf("pod %s, because no agent of node %s is connected", pod.Name, policy.Node)
	}
	return fmt.Sprintf("pod %s on node %s, which has not confirmed its policy", pod.Name, policy.Node)
}

const aboutTo = "all of them are about to confirm that"

// record returns what is to be on record of a configuration, and which pod it waits for.
func (t transfers) record(c *v1alpha1.ShardingConfig) (*v1alpha1.ActingLimits, string) {
	acting, ok := t.Acting[c.UID]
	switch {
	case c.Spec.Root != nil || compile.Derived(c):
		return nil, ""
	case !ok: // it owns nothing that another one could own later
		return &v1alpha1.ActingLimits{Hash: transfer.None}, ""
	case acting.Recorded == acting.Wanted:
		return c.Status.Acting, ""
	}
	waits := cmp.Or(t.unconfirmed[c.UID], t.strays[""], t.strays[c.Namespace])
	var others []transfer.Acting
	settled := true
	for _, o := range t.Configs {
		other, ok := t.Acting[o.UID]
		if !ok || o.UID == c.UID || !transfer.Share(c, o) {
			continue
		}
		others = append(others, other)
		settled = settled && t.current[o.UID]
		waits = cmp.Or(waits, t.unconfirmed[o.UID])
	}
	next := c.Status.Acting
	if t.current[c.UID] {
		next = acting.Record(others, settled && waits == "")
	}
	if next != nil && next.Hash == acting.Wanted {
		return next, ""
	}
	return next, cmp.Or(waits, aboutTo)
}
