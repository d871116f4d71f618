// Package failover frees the locks of shards whose leader is proven to have exited, so that the
// next leader need not wait for the lease to expire.
package failover

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/controllers"
	"github.com/ctrlmesh/ctrlmesh/manager/metrics"
	"github.com/ctrlmesh/ctrlmesh/manager/push"
)

// within bounds the time that is spent on one lock.
const within = 5 * time.Second

// Controller frees locks. It frees only Leases: other locks expire.
type Controller struct {
	// Client reads and writes past any cache.
	Client client.Client
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
	return controllers.Spec{Name: "failover", Reconcile: f.Reconcile, On: []controllers.Source{&f.State.Changed.Agents}}
}

// Reconcile frees what can be freed now.
func (f *Controller) Reconcile(ctx context.Context) error {
	c := f.State.Compiled.Load()
	if c == nil {
		return nil
	}
	done := map[write]struct{}{}
	var errs []error
	for _, shard := range c.Shards {
		for _, pod := range shard.Members {
			policy := c.Policies[pod.UID]
			s := policy.GetSharding()
			if s.GetShard() != shard.Name || s.GetStandby() || s.GetDryRun() {
				continue // members under this policy do not write the locks of the shard
			}
			for _, dead := range f.Observe(policy.Node, string(pod.UID)).Dead {
				lock := named(s, dead)
				if lock == nil || dead.Identity == "" || dead.Version == "" {
					continue
				}
				w := write{pod.UID, dead}
				if err := f.succeed(ctx, shard, pod, lock, w); err != nil {
					errs = append(errs, err)
					continue
				}
				done[w] = struct{}{}
			}
		}
	}
	f.done = done
	return errors.Join(errs...)
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
	freed, err := f.free(ctx, client.ObjectKey{Namespace: lock.GetNamespace(), Name: lock.GetUpstreamName()}, w.dead)
	if freed {
		f.report(shard, pod, lock.GetUpstreamName())
	}
	return err
}

// free changes a Lease as its holder would on a graceful exit, unless another client has written
// it since.
func (f *Controller) free(ctx context.Context, key client.ObjectKey, dead push.Holder) (bool, error) {
	lease := &unstructured.Unstructured{} // to keep unknown fields
	lease.SetGroupVersionKind(coordinationv1.SchemeGroupVersion.WithKind("Lease"))
	err := f.Client.Get(ctx, key, lease)
	if apierrors.IsNotFound(err) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("reading Lease %s, whose holder has exited: %w", key, err)
	}
	spec, ok := lease.Object["spec"].(map[string]any)
	if !ok || lease.GetResourceVersion() != dead.Version || spec["holderIdentity"] != dead.Identity {
		return false, nil
	}
	now := metav1.NowMicro().UTC().Format(metav1.RFC3339Micro)
	spec["holderIdentity"], spec["leaseDurationSeconds"] = "", int64(1)
	spec["acquireTime"], spec["renewTime"] = now, now
	err = f.Client.Update(ctx, lease)
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("freeing Lease %s, whose holder has exited: %w", key, err)
	}
	return true, nil
}

func (f *Controller) report(shard compile.Shard, pod *corev1.Pod, lock string) {
	metrics.LocksFreed.Inc()
	f.Log.Info("freed the lock of a holder that has exited", "shard", shard.NamespacedName, "pod", pod.Name, "lock", lock)
	config := shard.Config
	if config == nil {
		config = shard.Root
	}
	if config != nil {
		f.Recorder.Eventf(config, pod, corev1.EventTypeNormal, "LockFreed", "Free", "Lease %s was freed: its holder, in pod %s, has exited", lock, pod.Name)
	}
}
