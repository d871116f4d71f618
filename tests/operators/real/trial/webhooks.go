package trial

import (
	"context"
	"fmt"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/internal/failure"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

// webhooksReady returns an error unless all webhooks that the manifests register have the CA of
// their certificates, which is filled in after they are applied.
func (t *trial) webhooksReady(ctx context.Context, objects []*unstructured.Unstructured) error {
	for _, o := range objects {
		switch o.GetKind() {
		case "ValidatingWebhookConfiguration", "MutatingWebhookConfiguration":
			if err := t.registered(ctx, o); err != nil {
				return err
			}
		case definition:
			crd := &apiextensionsv1.CustomResourceDefinition{}
			if err := t.Get(ctx, client.ObjectKeyFromObject(o), crd); err != nil {
				return err
			}
			if c := crd.Spec.Conversion; c != nil && c.Webhook != nil && len(c.Webhook.ClientConfig.CABundle) == 0 {
				return fmt.Errorf("the conversion of %s has no CA", o.GetName())
			}
		}
	}
	return nil
}

// registered returns an error unless each webhook of a configuration has a CA.
func (t *trial) registered(ctx context.Context, o *unstructured.Unstructured) error {
	now := &unstructured.Unstructured{}
	now.SetGroupVersionKind(o.GroupVersionKind())
	if err := t.Get(ctx, client.ObjectKeyFromObject(o), now); err != nil {
		return err
	}
	webhooks, _, err := unstructured.NestedSlice(now.Object, "webhooks")
	for _, w := range webhooks {
		w, ok := w.(map[string]any)
		if !ok {
			continue
		}
		if ca, _, _ := unstructured.NestedString(w, "clientConfig", "caBundle"); ca == "" {
			return fmt.Errorf("webhook %v has no CA", w["name"])
		}
	}
	return err
}

// reviewed waits until the agents have forwarded reviews to the shards that own the
// namespaces, and counts the reviews.
func (t *trial) reviewed(ctx context.Context, result *Result) error {
	if t.Webhook == nil {
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
			out[decision] += int(kube.Total(families["ctrlmesh_reviews_total"], map[string]string{"namespace": t.Home, "decision": decision}))
		}
	}
	return out, nil
}
