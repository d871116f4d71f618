package compile

import (
	corev1 "k8s.io/api/core/v1"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
)

// dryRun is the plan of a root with spec.dryRun. Its shards own nothing, and the pods act
// on all objects until the dry run ends. So its end is the same as the adoption of any
// running workload.
type dryRun struct {
	placed map[string]string // shards by pod uid
	scopes map[string]sharding.Scope
	owners []*meshv1.Owner
}

// planDryRun divides the keys evenly among the shards, and assigns the pods to shards.
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

// judgeDryRun fills in the policy of a pod in a dry run. A pod without a shard gets no
// sharding.
func (r *root) judgeDryRun(pod *corev1.Pod, p *meshv1.PodPolicy) {
	p.Serial = uint64(r.State.MinSerial)
	if m, assigned := r.State.Members[string(pod.UID)]; assigned {
		// The pod was a member before the dry run: its shard releases its keys.
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
