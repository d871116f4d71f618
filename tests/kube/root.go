package kube

import (
	"errors"
	"fmt"

	"k8s.io/apimachinery/pkg/api/meta"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

// Settled returns an error unless a root has the given number of shards, all with ready
// members, and no handover.
func Settled(root *meshv1alpha1.ShardingConfig, shards int) error {
	s := root.Status.Root
	switch {
	case root.Status.ObservedGeneration != root.Generation || s == nil:
		return errors.New("the manager has not seen the root")
	case s.Handover != "Settled":
		return fmt.Errorf("%s: %s: %s", s.Handover, handovers(s), ReadyMessage(root))
	case len(s.Shards) != shards:
		return fmt.Errorf("there are %d shards of %d", len(s.Shards), shards)
	}
	for _, shard := range s.Shards {
		if shard.ReadyMembers == 0 || shard.ReadyMembers < shard.Members {
			return fmt.Errorf("%s has %d members, %d ready: %s", shard.Name, shard.Members, shard.ReadyMembers, ReadyMessage(root))
		}
	}
	return nil
}

// handovers describes the current handovers.
func handovers(s *meshv1alpha1.RootStatus) (out []string) {
	for _, h := range s.Handovers {
		out = append(out, fmt.Sprintf("%s to %s %s, waits for %v", h.From, h.To, h.Phase, h.WaitsFor))
	}
	return out
}

// ReadyMessage returns what the status says, in a line.
func ReadyMessage(root *meshv1alpha1.ShardingConfig) string {
	ready := meta.FindStatusCondition(root.Status.Conditions, meshv1alpha1.ConditionReady)
	if ready == nil {
		return "no Ready condition"
	}
	return ready.Reason + ": " + ready.Message
}
