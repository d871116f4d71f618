package manager

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/manager/apiserver"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/inject"
	"github.com/ctrlmesh/ctrlmesh/manager/metrics"
)

// bootstrap waits until it knows the apiserver's addresses and the administrator's
// settings and has all CAs, without which nothing can be served.
func (w *world) bootstrap(ctx context.Context) error {
	backoff := wait.Backoff{Duration: 200 * time.Millisecond, Factor: 2, Steps: 10, Cap: 10 * time.Second}
	for {
		err := w.loadAll(ctx)
		if err == nil {
			return nil
		}
		w.Log.Warn("cannot start yet", "error", err)
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(backoff.Step()):
		}
	}
}

func (w *world) loadAll(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	cluster, err := w.readCluster(ctx, w.live)
	if err != nil {
		return err
	}
	w.Cluster.Store(cluster)
	// Maintain, not Load: a damaged one must not keep all replicas from starting.
	return errors.Join(w.loadCAs(ctx), w.serving.Maintain(ctx, nil), w.loadPlatform(ctx))
}

// readCluster finds out what agents must know of the apiserver and of each other.
func (w *world) readCluster(ctx context.Context, from client.Reader) (*meshv1.Cluster, error) {
	var service corev1.Service
	var parts discoveryv1.EndpointSliceList
	agents := &corev1.Service{}
	err := from.Get(ctx, types.NamespacedName{Namespace: w.Namespace, Name: apiserver.AgentService}, agents)
	if apierrors.IsNotFound(err) {
		agents, err = nil, nil // no pod is captured by address then
	}
	if err = errors.Join(err,
		from.Get(ctx, types.NamespacedName{Namespace: apiserver.Namespace, Name: apiserver.Name}, &service),
		from.List(ctx, &parts, client.InNamespace(apiserver.Namespace), client.MatchingLabels{discoveryv1.LabelServiceName: apiserver.Name}),
	); err != nil {
		return nil, err
	}
	return apiserver.Cluster(&service, agents, parts.Items, w.clusterCA(), w.authority.Bundle())
}

// follow keeps up with what the leader writes, while this replica is not it.
func (w *world) follow(ctx context.Context) error {
	tick := time.NewTicker(30 * time.Second)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-w.elected:
			return nil
		case <-tick.C:
		}
		if err := errors.Join(w.loadCAs(ctx), w.serving.Load(ctx)); err != nil && ctx.Err() == nil {
			w.Log.Warn("certificates could not be read again", "error", err)
		}
		metrics.MeshCAExpiry.Set(float64(w.authority.Expiry().Unix()))
	}
}

// keepTrust renews what is due and tells those who must know.
func (w *world) keepTrust(ctx context.Context) error {
	before, egress := w.authority.Bundle(), w.egress.Bundle()
	mesh := func(p *corev1.Pod) bool { return p.Annotations[v1alpha1.TrustAnnotation] != "" }
	err := errors.Join(
		w.authority.Maintain(ctx, dereference(w.MeshBundle.Load()), w.trusting(mesh)),
		w.egress.Maintain(ctx, dereference(w.EgressBundle.Load()), w.trusting(inject.TrustsEgress)),
		w.serving.Maintain(ctx, w.published),
	)
	metrics.MeshCAExpiry.Set(float64(w.authority.Expiry().Unix()))
	if !bytes.Equal(before, w.authority.Bundle()) {
		w.Changed.MeshCA.Notify()
	}
	if !bytes.Equal(egress, w.egress.Bundle()) {
		w.Changed.EgressCA.Notify()
	}
	told := errors.Join(w.publishCA(ctx), w.injectCA(ctx))
	if told == nil {
		w.published = w.serving.Bundle()
	}
	return errors.Join(err, told)
}

// loadCAs reads those that pods trust.
func (w *world) loadCAs(ctx context.Context) error {
	return errors.Join(w.authority.Load(ctx), w.egress.Load(ctx))
}

func dereference(b *[]byte) []byte {
	if b == nil {
		return nil
	}
	return *b
}

// permits tells whether agents' certificates may name an address. A replica that
// has not heard so looks again.
func (w *world) permits(ctx context.Context, ip netip.Addr) bool {
	if w.authority.Permits(ip) {
		return true
	}
	if err := w.authority.Load(ctx); err != nil {
		w.Log.Warn("certificates could not be read again", "error", err)
	}
	return w.authority.Permits(ip)
}

// trusting are the pods that trust a CA, and when they were created; nil while they
// are not known.
func (w *world) trusting(trusts func(*corev1.Pod) bool) map[string]time.Time {
	c := w.Compiled.Load()
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

// publishCA keeps the ConfigMap from which agents verify the manager.
func (w *world) publishCA(ctx context.Context) error {
	want := map[string]string{meshv1.ManagerCAKey: string(w.serving.Bundle())}
	cm := &corev1.ConfigMap{}
	err := w.live.Get(ctx, types.NamespacedName{Namespace: w.Namespace, Name: meshv1.ManagerCAConfigMap}, cm)
	switch {
	case apierrors.IsNotFound(err):
		err = w.live.Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: w.Namespace, Name: meshv1.ManagerCAConfigMap}, Data: want})
	case err == nil && cm.Data[meshv1.ManagerCAKey] != want["ca.crt"]:
		cm.Data = want
		err = w.live.Update(ctx, cm)
	}
	if err != nil {
		return fmt.Errorf("ConfigMap %s/%s: %w", w.Namespace, meshv1.ManagerCAConfigMap, err)
	}
	return nil
}

// injectCA tells the apiserver how to verify the webhooks.
func (w *world) injectCA(ctx context.Context) error {
	ca := w.serving.Bundle()
	key := types.NamespacedName{Name: w.WebhookConfiguration}
	inject := func(object client.Object, clients func() []*admissionv1.WebhookClientConfig) error {
		if err := w.live.Get(ctx, key, object); err != nil {
			return fmt.Errorf("%T %s: %w", object, key.Name, err)
		}
		changed := false
		for _, c := range clients() {
			if !bytes.Equal(c.CABundle, ca) {
				c.CABundle, changed = ca, true
			}
		}
		if !changed {
			return nil
		}
		if err := w.live.Update(ctx, object); err != nil {
			return fmt.Errorf("%T %s: %w", object, key.Name, err)
		}
		return nil
	}
	mutating, validating := &admissionv1.MutatingWebhookConfiguration{}, &admissionv1.ValidatingWebhookConfiguration{}
	return errors.Join(
		inject(mutating, func() (out []*admissionv1.WebhookClientConfig) {
			for i := range mutating.Webhooks {
				out = append(out, &mutating.Webhooks[i].ClientConfig)
			}
			return out
		}),
		inject(validating, func() (out []*admissionv1.WebhookClientConfig) {
			for i := range validating.Webhooks {
				out = append(out, &validating.Webhooks[i].ClientConfig)
			}
			return out
		}),
	)
}
