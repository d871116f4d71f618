package harness

import (
	"context"
	"fmt"
	"strings"
	"time"

	autoscalingv1 "k8s.io/api/autoscaling/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/internal/failure"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

// WithoutManager stops all managers, and returns a function that restores them. The caller must
// call it unless it is nil, even with an error.
func (w *Testbed) WithoutManager(ctx context.Context) (restore func() error, err error) {
	m := kube.Manager()
	if err := w.Get(ctx, client.ObjectKeyFromObject(m), m); err != nil {
		return nil, fmt.Errorf("reading the manager: %w", err)
	}
	before := *m.Spec.Replicas
	scale := func(ctx context.Context, replicas int32) error {
		m.ResourceVersion = ""
		return w.SubResource("scale").Update(ctx, m,
			client.WithSubResourceBody(&autoscalingv1.Scale{ObjectMeta: m.ObjectMeta, Spec: autoscalingv1.ScaleSpec{Replicas: replicas}}))
	}
	restore = func() error {
		ctx := context.WithoutCancel(ctx) // restored even if the part is interrupted
		if err := scale(ctx, before); err != nil {
			return fmt.Errorf("bringing the manager back: %w", err)
		}
		return w.Until(ctx, "the manager's return", func(ctx context.Context) error { return w.RolledOut(ctx, kube.Manager()) })
	}
	if err := scale(ctx, 0); err != nil {
		return restore, fmt.Errorf("taking the manager away: %w", err)
	}
	return restore, w.Until(ctx, "the managers' end", func(ctx context.Context) error {
		var pods corev1.PodList
		return kube.Empty(&pods, w.List(ctx, &pods, client.InNamespace(kube.SystemNamespace), client.MatchingLabels{"app.kubernetes.io/name": kube.ManagerName}))
	})
}

// renewed is the age from which the lease of a manager that leads is not. It is renewed every
// 2 s.
const renewed = 5 * time.Second

// ManagerLeads reports whether a manager has renewed its lease lately.
func (w *Testbed) ManagerLeads(ctx context.Context) (bool, error) {
	lease, err := w.leadership(ctx)
	return err == nil && time.Since(lease.Spec.RenewTime.Time) < renewed, err
}

func (w *Testbed) leadership(ctx context.Context) (*coordinationv1.Lease, error) {
	lease := &coordinationv1.Lease{}
	return lease, failure.Wrap(w.Get(ctx, client.ObjectKey{Namespace: kube.SystemNamespace, Name: kube.ManagerName}, lease), "finding the leader")
}

// LeadingManager returns the pod of the manager that leads.
func (w *Testbed) LeadingManager(ctx context.Context) (*corev1.Pod, error) {
	lease, err := w.leadership(ctx)
	if err != nil {
		return nil, err
	}
	name, _, _ := strings.Cut(*lease.Spec.HolderIdentity, "_")
	pod := &corev1.Pod{}
	return pod, failure.Wrap(w.Get(ctx, client.ObjectKey{Namespace: kube.SystemNamespace, Name: name}, pod), "finding the leader")
}
