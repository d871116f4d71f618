package decide

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/manager/handover"
	"github.com/ctrlmesh/ctrlmesh/manager/idle"
	"github.com/ctrlmesh/ctrlmesh/manager/push"
)

// The pods of a shard may wait for an election that no lock shows.
func TestShardThatNeverWritesIsMarked(t *testing.T) {
	t.Parallel()
	facts := Facts{Pods: Pods{ByUID: map[string]*corev1.Pod{"a": {}, "b": {}}}}
	state := handover.State{Members: map[string]handover.Member{"a": {UID: "a", Shard: "op-1-normal"}, "b": {UID: "b", Shard: "op-2-normal"}}}
	reports := func(uid string, activity ...*meshv1.ResourceActivity) {
		if facts.Agents.Observed == nil {
			facts.Agents.Observed = map[PodKey]push.Observation{}
		}
		facts.Agents.Observed[PodKey{UID: uid}] = push.Observation{Reported: true, Activity: activity}
	}
	reports("a", &meshv1.ResourceActivity{Resource: "configmaps", Divided: true, Watched: true, Writes: 100})
	watches := &meshv1.ResourceActivity{Resource: "configmaps", Divided: true, Watched: true}
	reports("b", watches)
	var memory Memory
	marks := func(at time.Duration) (out []string) {
		d := &deciding{v: &view{Facts: facts, now: time.Unix(1e9, 0).Add(at)}, memory: memory, next: state}
		status := &v1alpha1.RootStatus{Shards: []v1alpha1.ShardStatus{{Name: "op-1-normal", Weight: 40}, {Name: "op-2-normal", Weight: 40}}}
		d.markIdle(status)
		memory = d.memory
		for _, s := range status.Shards {
			if s.Idle {
				out = append(out, s.Name)
			}
		}
		return out
	}
	require.Empty(t, marks(0))
	require.Equal(t, []string{"op-2-normal"}, marks(idle.After))
	reports("b", watches, &meshv1.ResourceActivity{Resource: "secrets", Writes: 1})
	require.Empty(t, marks(idle.After))
}
