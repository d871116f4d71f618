package policy

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/controllers"
)

// list reads the cache.
func (r *Controller) list(ctx context.Context) (*controllers.Listed, error) {
	var configs v1alpha1.ShardingConfigList
	var pods corev1.PodList
	var namespaces metav1.PartialObjectMetadataList
	namespaces.SetGroupVersionKind(controllers.NamespaceKind)
	var breakers v1alpha1.CircuitBreakerList
	var injections v1alpha1.FaultInjectionList
	if err := errors.Join(
		r.Cache.List(ctx, &configs), r.Cache.List(ctx, &pods), r.Cache.List(ctx, &namespaces),
		// These are not changed here, and there may be many that have no effect.
		r.Cache.List(ctx, &breakers, client.UnsafeDisableDeepCopy), r.Cache.List(ctx, &injections, client.UnsafeDisableDeepCopy),
	); err != nil {
		return nil, err
	}
	out := &controllers.Listed{Rules: compile.Rules{Cache: &r.rendered, Now: time.Now(), Share: r.State.Book.Share, RequestTimeout: r.State.RequestTimeout()}}
	for i := range breakers.Items {
		out.Rules.Breakers = append(out.Rules.Breakers, &breakers.Items[i])
	}
	for i := range injections.Items {
		out.Rules.Injections = append(out.Rules.Injections, &injections.Items[i])
	}
	for i := range configs.Items {
		out.Configs = append(out.Configs, &configs.Items[i])
	}
	// A cache lists in no order.
	slices.SortFunc(out.Configs, func(a, b *v1alpha1.ShardingConfig) int { return strings.Compare(string(a.UID), string(b.UID)) })
	for i := range pods.Items {
		out.Pods = append(out.Pods, &pods.Items[i])
	}
	for _, n := range namespaces.Items {
		out.Namespaces = append(out.Namespaces, n.Name)
		if compile.ForbidsFaults(&n) {
			out.Rules.NoFaults = append(out.Rules.NoFaults, n.Name)
		}
	}
	slices.Sort(out.Namespaces)
	return out, nil
}
