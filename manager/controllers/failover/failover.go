// Package failover frees the locks of shards whose leader is proven to have exited, so that the
// next leader need not wait for the lease to expire.
package failover

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/failure"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/controllers"
	"github.com/ctrlmesh/ctrlmesh/manager/locks"
	"github.com/ctrlmesh/ctrlmesh/manager/metrics"
	"github.com/ctrlmesh/ctrlmesh/manager/push"
)

// within bounds the time that is spent on one lock.
const within = 5 * time.Second

// Controller frees locks.
type Controller struct {
	// Client reads and writes past any cache.
	Client client.Client
	// Exits returns the uids of the pods of which Observe may return dead holders: few, of very many pods.
	Exits func() map[string]bool
	// Observe returns what the agent of a node reported of a pod.
	Observe  func(node, uid string) push.Observation
	Recorder events.EventRecorder
	State    *controllers.State
	Log      *slog.Logger

	done map[write]struct{} // writes that are handled
}

// write is a pod's last write of a lock.
type write struct {
	pod  types.UID
	dead push.Holder
}

// Spec implements controllers.Reconciler.
func (f *Controller) Spec() controllers.Spec {
	return controllers.Spec{Name: "failover", Reconcile: f.Reconcile, Rests: true, On: []controllers.Source{&f.State.Changed.Agents}}
}

// Reconcile frees what can be freed now.
func (f *Controller) Reconcile(ctx context.Context) error {
	c, exits := f.State.Compiled.Load(), f.Exits()
	done := map[write]struct{}{}
	var errs []error
	if c != nil && len(exits) > 0 {
		for _, shard := range c.Shards {
			for _, pod := range shard.Members {
				if exits[string(pod.UID)] {
					errs = append(errs, f.freeOf(ctx, c, shard, pod, done))
				}
			}
		}
	}
	f.done = done
	return errors.Join(errs...)
}

// freeOf frees the locks of a shard that a member wrote last, and adds to done what it handled.
func (f *Controller) freeOf(ctx context.Context, c *controllers.Compiled, shard compile.Shard, pod *corev1.Pod, done map[write]struct{}) error {
	policy := c.Policies[pod.UID]
	s := policy.GetSharding()
	if s.GetShard() != shard.Name || s.GetStandby() || s.GetDryRun() {
		return nil // members under this policy do not write the locks of the shard
	}
	failed := map[*meshv1.Lock]bool{}
	var errs []error
	for _, dead := range f.Observe(policy.Node, string(pod.UID)).Dead {
		lock := named(s, dead)
		// If a lock is freed in part, clients wait until it expires.
		if lock == nil || dead.Identity == "" || dead.Version == "" || failed[lock] ||
			dead.Resource != locks.Leases && f.heldElsewhere(c, shard, pod, lock) {
			continue
		}
		w := write{pod.UID, dead}
		if err := f.succeed(ctx, shard, pod, lock, w); err != nil {
			failed[lock] = true
			errs = append(errs, err)
			continue
		}
		done[w] = struct{}{}
	}
	return errors.Join(errs...)
}

// heldElsewhere reports whether another member of a shard may hold a lock: it wrote the lock last,
// and nothing shows that it has exited. What a member wrote into a ConfigMap or Endpoints, which have
// other content, may have another's name in it.
func (f *Controller) heldElsewhere(c *controllers.Compiled, shard compile.Shard, pod *corev1.Pod, lock *meshv1.Lock) bool {
	return slices.ContainsFunc(shard.Members, func(other *corev1.Pod) bool {
		if other.UID == pod.UID {
			return false
		}
		o := f.Observe(c.Policies[other.UID].Node, string(other.UID))
		return slices.Contains(o.HeldLocks, lock.GetNamespace()+"/"+lock.GetName()) &&
			!slices.ContainsFunc(o.Dead, func(h push.Holder) bool { return h.Namespace == lock.GetNamespace() && h.Name == lock.GetName() })
	})
}

// named returns the lock of a policy that a pod wrote; nil if the policy no longer names it.
func named(s *meshv1.Sharding, dead push.Holder) *meshv1.Lock {
	for _, l := range s.GetLocks() {
		if l.GetNamespace() == dead.Namespace && l.GetName() == dead.Name {
			return l
		}
	}
	return nil
}

// succeed frees a lock once.
func (f *Controller) succeed(ctx context.Context, shard compile.Shard, pod *corev1.Pod, lock *meshv1.Lock, w write) error {
	if _, ok := f.done[w]; ok {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	name := types.NamespacedName{Namespace: lock.GetNamespace(), Name: lock.GetUpstreamName()}
	freed, err := locks.Free(ctx, f.Client, w.dead.Resource, name, w.dead.Identity, w.dead.Version)
	if freed {
		f.report(shard, pod, w.dead.Resource, name.Name)
	}
	return failure.Wrap(err, "freeing a lock whose holder has exited")
}

func (f *Controller) report(shard compile.Shard, pod *corev1.Pod, resource, lock string) {
	metrics.LocksFreed.Inc()
	f.Log.Info("freed the lock of a holder that has exited", "shard", shard.NamespacedName, "pod", pod.Name, "lock", lock, "resource", resource)
	config := shard.Config
	if config == nil {
		config = shard.Root
	}
	if config != nil {
		f.Recorder.Eventf(config, pod, corev1.EventTypeNormal, "LockFreed", "Free", "%s/%s was freed: its holder, in pod %s, has exited", resource, lock, pod.Name)
	}
}
