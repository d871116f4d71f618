package compile

import (
	corev1 "k8s.io/api/core/v1"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
)

// dryRun is what a root under spec.dryRun would do. Its shards own nothing, so that the
// end of the dry run is an adoption as any other: the pods act on everything until then.
type dryRun struct {
	placed map[string]string // shards by pod uid
	scopes map[string]sharding.Scope
	owners []*meshv1.Owner
}

// planDryRun divides keys evenly among the shards, and places the pods.
func planDryRun(r *root, pods []*corev1.Pod) *dryRun {
	spec := r.config.Spec.Root
	var own []*corev1.Pod
	for _, pod := range pods {
		if pod.Namespace == r.config.Namespace && Labelled(pod) && layout.Selects(spec, pod) {
			own = append(own, pod)
		}
	}
	d := &dryRun{scopes: layout.First(spec, nil)}
	d.placed, _ = layout.Place(spec, own, nil)
	d.owners = ownersOf(d.scopes)
	return d
}

// judgeDryRun fills in the policy of a pod whose requests are only judged. One that has
// no shard is left alone.
func (r *root) judgeDryRun(pod *corev1.Pod, p *meshv1.PodPolicy) {
	p.Serial = uint64(r.State.MinSerial)
	if m, assigned := r.State.Members[string(pod.UID)]; assigned {
		// It was under another policy: what its shard owned is released.
		p.Serial = uint64(r.State.Shards[m.Shard].Serial)
		if d := r.derived[m.Shard]; d != nil {
			d.Members = append(d.Members, pod)
		}
	}
	shard := r.dryRun.placed[string(pod.UID)]
	if shard == "" {
		return
	}
	t := tellable{shard: shard}
	if r.told[t] == nil {
		s := r.sharding(shard)
		s.Locks = shardLocks(OperatorLocks(r.config, r.Locks), shard)
		r.limit(s, r.dryRun.scopes[shard])
		s.Owners = r.dryRun.owners
		isolate(s, r.config)
		r.told[t] = s
	}
	p.Sharding = r.told[t]
}
