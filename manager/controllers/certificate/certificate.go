// Package certificate renews the mesh's CAs and the manager's certificate, and publishes the CAs
// that verify them.
package certificate

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/failure"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/controllers"
	"github.com/ctrlmesh/ctrlmesh/manager/inject"
	"github.com/ctrlmesh/ctrlmesh/manager/metrics"
	"github.com/ctrlmesh/ctrlmesh/manager/trust"
)

// followEvery is how often the other replicas read what the leader wrote.
const followEvery = 30 * time.Second

// Controller maintains the Authorities.
type Controller struct {
	Client client.Client
	// Namespace of the mesh.
	Namespace string
	// WebhookConfiguration is the name of the Mutating- and of the
	// ValidatingWebhookConfiguration that verify the manager.
	WebhookConfiguration string
	*trust.Authorities
	State *controllers.State
	Log   *slog.Logger

	// published is the bundle that was published last to verify the manager.
	published []byte
}

// Spec implements controllers.Reconciler.
func (r *Controller) Spec() controllers.Spec {
	return controllers.Spec{
		Name: "trust", Reconcile: r.Reconcile, Debounce: time.Second, Resync: time.Minute,
		On: []controllers.Source{
			r.State.Cluster.When(otherCluster),
			// A rotation waits for the bundles.
			r.State.MeshBundle.When(controllers.Differ), r.State.EgressBundle.When(controllers.Differ),
		},
	}
}

// otherCluster reports whether its version has changed.
func otherCluster(before, after *meshv1.Cluster) bool {
	return before.GetVersion() != after.GetVersion()
}

// Reconcile renews certificates that are due, and publishes the CAs.
func (r *Controller) Reconcile(ctx context.Context) error {
	before, egress := r.Mesh.Bundle(), r.Egress.Bundle()
	mesh := func(p *corev1.Pod) bool { return p.Annotations[v1alpha1.TrustAnnotation] != "" }
	err := errors.Join(
		r.Mesh.Maintain(ctx, ptr.Deref(r.State.MeshBundle.Load(), nil), r.trusting(mesh)),
		r.Egress.Maintain(ctx, ptr.Deref(r.State.EgressBundle.Load(), nil), r.trusting(inject.TrustsEgress)),
		r.Serving.Maintain(ctx, r.published),
	)
	metrics.MeshCAExpiry.Set(float64(r.Mesh.Expiry().Unix()))
	if !bytes.Equal(before, r.Mesh.Bundle()) {
		r.State.Changed.MeshCA.Notify()
	}
	if !bytes.Equal(egress, r.Egress.Bundle()) {
		r.State.Changed.EgressCA.Notify()
	}
	publishErr := errors.Join(
		// Agents verify the manager by this ConfigMap.
		inject.WriteConfigMap(ctx, r.Client, r.Namespace, meshv1.ManagerCAConfigMap, map[string]string{meshv1.ManagerCAKey: string(r.Serving.Bundle())}),
		r.injectCA(ctx),
	)
	if publishErr == nil {
		r.published = r.Serving.Bundle()
	}
	return errors.Join(err, publishErr)
}

// Follow reloads what the leader writes until this replica is elected.
func (r *Controller) Follow(ctx context.Context, elected <-chan struct{}) error {
	tick := time.NewTicker(followEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-elected:
			return nil
		case <-tick.C:
		}
		if err := errors.Join(r.Load(ctx), r.Serving.Load(ctx)); err != nil && ctx.Err() == nil {
			r.Log.Warn("failed to reload certificates", "error", err)
		}
		metrics.MeshCAExpiry.Set(float64(r.Mesh.Expiry().Unix()))
	}
}

// trusting returns the creation times of the pods that trust a CA; nil while they are unknown.
func (r *Controller) trusting(trusts func(*corev1.Pod) bool) map[string]time.Time {
	c := r.State.Compiled.Load()
	if c == nil {
		return nil
	}
	pods := map[string]time.Time{}
	for _, p := range c.Pods {
		if trusts(p) && !compile.Ended(p) {
			pods[p.Namespace+"/"+p.Name] = p.CreationTimestamp.Time
		}
	}
	return pods
}

// injectCA writes the CA by which the apiserver verifies the webhooks.
func (r *Controller) injectCA(ctx context.Context) error {
	meta, ca := metav1.ObjectMeta{Name: r.WebhookConfiguration}, r.Serving.Bundle()
	_, mutating := controllers.Change(ctx, r.Client, &admissionv1.MutatingWebhookConfiguration{ObjectMeta: meta}, func(c *admissionv1.MutatingWebhookConfiguration) {
		for i := range c.Webhooks {
			c.Webhooks[i].ClientConfig.CABundle = ca
		}
	})
	_, validating := controllers.Change(ctx, r.Client, &admissionv1.ValidatingWebhookConfiguration{ObjectMeta: meta}, func(c *admissionv1.ValidatingWebhookConfiguration) {
		for i := range c.Webhooks {
			c.Webhooks[i].ClientConfig.CABundle = ca
		}
	})
	return errors.Join(
		failure.Wrap(mutating, "writing the CA into MutatingWebhookConfiguration %s", meta.Name),
		failure.Wrap(validating, "writing the CA into ValidatingWebhookConfiguration %s", meta.Name),
	)
}
