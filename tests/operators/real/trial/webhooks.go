package trial

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/ctrlmesh/ctrlmesh/internal/failure"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

// The Service of an operator's webhooks, and the port at which it serves them.
const (
	webhookService = "webhook"
	webhookPort    = 9443
)

// webhookName is the name that is verified in the certificate of the webhooks.
func (t *trial) webhookName() string { return webhookService + "." + t.home + ".svc" }

// applyWebhooks registers the webhooks of the operator's module, for the namespaces of the
// trial alone. They are as the module has them but for the Service, the CA and the names.
func (t *trial) applyWebhooks(ctx context.Context, ca []byte, owned []metav1.OwnerReference) error {
	if t.Webhooks == "" {
		return nil
	}
	service := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: t.home, Name: webhookService},
		Spec: corev1.ServiceSpec{
			Selector: map[string]string{appLabel: t.Name},
			Ports:    []corev1.ServicePort{{Port: 443, TargetPort: intstr.FromInt32(webhookPort)}},
		},
	}
	if err := t.Create(ctx, service); err != nil {
		return fmt.Errorf("creating the webhooks' Service: %w", err)
	}
	text, err := os.ReadFile(filepath.Join(t.Module, t.Webhooks))
	if err != nil {
		return fmt.Errorf("reading the operator's webhooks: %w", err)
	}
	objects, err := decode(text)
	if err != nil {
		return fmt.Errorf("reading the operator's webhooks: %w", err)
	}
	for _, o := range objects {
		o.SetName(t.home + "-" + o.GetName())
		o.SetOwnerReferences(owned)
		if err := errors.Join(t.register(o, ca), t.ApplyObject(ctx, o)); err != nil {
			return fmt.Errorf("registering %s: %w", o.GetName(), err)
		}
	}
	return nil
}

// register makes the webhooks of a configuration those of this trial.
func (t *trial) register(o *unstructured.Unstructured, ca []byte) error {
	webhooks, found, err := unstructured.NestedSlice(o.Object, "webhooks")
	if err != nil || !found {
		return errors.Join(err, errors.New("it has no webhooks"))
	}
	for _, w := range webhooks {
		fields, ok := w.(map[string]any)
		if !ok {
			return errors.New("a webhook is no object")
		}
		for _, set := range []struct {
			to   any
			path []string
		}{
			{t.home, []string{"clientConfig", "service", "namespace"}},
			{webhookService, []string{"clientConfig", "service", "name"}},
			{base64.StdEncoding.EncodeToString(ca), []string{"clientConfig", "caBundle"}},
			{t.Name, []string{"namespaceSelector", "matchLabels", trialMark}},
		} {
			if err := unstructured.SetNestedField(fields, set.to, set.path...); err != nil {
				return err
			}
		}
	}
	return unstructured.SetNestedSlice(o.Object, webhooks, "webhooks")
}

// reviewed waits until the agents have forwarded reviews to the shards that own the
// namespaces, and counts the reviews.
func (t *trial) reviewed(ctx context.Context, result *Result) error {
	if t.Webhooks == "" {
		return nil
	}
	return t.until(ctx, "reviews to reach their shards", func(ctx context.Context) (err error) {
		result.Reviews, err = t.reviews(ctx)
		if err == nil && result.Reviews["forwarded"] == 0 {
			err = fmt.Errorf("none was forwarded: %v", result.Reviews)
		}
		return err
	})
}

// reviews returns how many reviews the agents decided in each way.
func (t *trial) reviews(ctx context.Context) (map[string]int, error) {
	agents, err := t.MeshPods(ctx, kube.AgentName)
	if err != nil {
		return nil, err
	}
	out := map[string]int{}
	for i := range agents {
		families, err := t.Scrape(ctx, &agents[i])
		if err != nil {
			return nil, failure.Wrap(err, "counting reviews")
		}
		for _, decision := range []string{"local", "forwarded", "unreachable"} {
			out[decision] += int(kube.Total(families["ctrlmesh_reviews_total"], map[string]string{"namespace": t.home, "decision": decision}))
		}
	}
	return out, nil
}
