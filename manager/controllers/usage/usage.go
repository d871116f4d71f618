// Package usage records what operators request while their requests pass unchanged, so that their owners learn
// whether they can be divided. Each namespace with such an operator has one ConfigMap.
package usage

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/parallel"
	"github.com/ctrlmesh/ctrlmesh/manager/controllers"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
	"github.com/ctrlmesh/ctrlmesh/manager/push"
	"github.com/ctrlmesh/ctrlmesh/manager/usage"
)

const (
	// interval is the time between two writes of a ConfigMap.
	interval = time.Minute
	// atOnce bounds the namespaces that are updated at the same time, perNamespace the time of each: a
	// webhook may take 10 s by default.
	atOnce       = 8
	perNamespace = 12 * time.Second
	// sweepInterval is the time between two searches for records that are too old.
	sweepInterval = time.Hour
)

// Controller writes the ConfigMaps.
type Controller struct {
	Client  client.Client
	Observe func(node, uid string) push.Observation
	State   *controllers.State
	Log     *slog.Logger
	Now     func() time.Time

	swept time.Time
}

// Spec implements controllers.Reconciler.
func (r *Controller) Spec() controllers.Spec {
	return controllers.Spec{Name: "usage", Reconcile: r.Reconcile, Resync: interval}
}

// Reconcile records what the agents reported since the last run.
func (r *Controller) Reconcile(ctx context.Context) error {
	c := r.State.Compiled.Load()
	if c == nil {
		return nil
	}
	now, reported := r.Now(), r.reported(c)
	sweeps := now.Sub(r.swept) >= sweepInterval
	if sweeps {
		if err := r.old(ctx, reported); err != nil {
			return err
		}
	}
	err := r.updateAll(ctx, reported)
	if sweeps && err == nil {
		r.swept = now
	}
	return err
}

// updateAll updates the records of namespaces. One that is slow delays no others for long.
func (r *Controller) updateAll(ctx context.Context, reported map[string]usage.Record) error {
	return errors.Join(parallel.Each(slices.Sorted(maps.Keys(reported)), atOnce, func(namespace string) error {
		ctx, cancel := context.WithTimeout(ctx, perNamespace)
		defer cancel()
		return r.update(ctx, namespace, reported[namespace])
	})...)
}

// reported returns what the agents report, by namespace.
func (r *Controller) reported(c *controllers.Compiled) map[string]usage.Record {
	out := map[string]usage.Record{}
	for _, pod := range c.Pods {
		w, ok := layout.WorkloadOf(pod)
		if sharding := c.Policies[pod.UID].GetSharding(); !ok || pod.Spec.NodeName == "" || sharding != nil && !sharding.GetDryRun() {
			continue
		}
		used := r.Observe(pod.Spec.NodeName, string(pod.UID)).Usage
		if used == nil {
			continue
		}
		if out[pod.Namespace] == nil {
			out[pod.Namespace] = usage.Record{}
		}
		out[pod.Namespace].Update(usage.Key(w), &meshv1.PodUsage{Uid: string(pod.UID), Name: pod.Name, Usage: used})
	}
	return out
}

// update adds reports to the record of a namespace, and removes what is too old. A namespace that refuses
// the ConfigMap, such as by a quota, or because it made it immutable, has no record.
func (r *Controller) update(ctx context.Context, namespace string, reported usage.Record) error {
	cm := &corev1.ConfigMap{}
	err := r.Client.Get(ctx, types.NamespacedName{Namespace: namespace, Name: usage.ConfigMap}, cm)
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("reading the usage in namespace %s: %w", namespace, err)
	}
	before := usage.Decode(cm.Data)
	record := usage.Decode(cm.Data)
	for key, of := range reported {
		for _, pod := range of.GetPods() {
			record.Update(key, pod)
		}
	}
	record.Prune(r.Now())
	if record.Equal(before) {
		return nil
	}
	if err := r.write(ctx, namespace, cm, record); apierrors.IsForbidden(err) || apierrors.IsInvalid(err) || apierrors.IsConflict(err) {
		r.Log.Debug("a namespace refuses the record of usage", "namespace", namespace, "error", err)
	} else if err != nil {
		return fmt.Errorf("recording the usage in namespace %s: %w", namespace, err)
	}
	return nil
}

// write creates, replaces or deletes the ConfigMap. cm is as it was read.
func (r *Controller) write(ctx context.Context, namespace string, cm *corev1.ConfigMap, record usage.Record) error {
	data, err := record.Encode()
	if err != nil {
		return err
	}
	exists := cm.ResourceVersion != ""
	switch {
	case len(record) == 0 && exists:
		return client.IgnoreNotFound(r.Client.Delete(ctx, cm))
	case len(record) == 0:
		return nil
	}
	cm.Namespace, cm.Name, cm.Data = namespace, usage.ConfigMap, data
	metav1.SetMetaDataLabel(&cm.ObjectMeta, usage.Label, "true")
	if exists {
		return r.Client.Update(ctx, cm)
	}
	return r.Client.Create(ctx, cm)
}

// old adds the namespaces that have a record, whose operators may be observed no more.
func (r *Controller) old(ctx context.Context, to map[string]usage.Record) error {
	found := &metav1.PartialObjectMetadataList{}
	found.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("ConfigMapList"))
	if err := r.Client.List(ctx, found, client.MatchingLabels{usage.Label: "true"}); err != nil {
		return fmt.Errorf("listing records of usage: %w", err)
	}
	for i := range found.Items {
		if o := &found.Items[i]; o.Name == usage.ConfigMap && to[o.Namespace] == nil {
			to[o.Namespace] = nil
		}
	}
	return nil
}
