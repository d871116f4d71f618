package webhook

import (
	"testing"

	"github.com/stretchr/testify/require"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	"github.com/ctrlmesh/ctrlmesh/manager/route"
)

func TestServicesThatTheApiserverCalls(t *testing.T) {
	calls := func(namespace, name, ca string) admissionv1.WebhookClientConfig {
		return admissionv1.WebhookClientConfig{Service: &admissionv1.ServiceReference{Namespace: namespace, Name: name}, CABundle: []byte(ca)}
	}
	selector := map[string]string{"app": "op"}
	service := func(namespace, name string) *corev1.Service {
		return &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}, Spec: corev1.ServiceSpec{Selector: selector}}
	}
	c := &Controller{Client: fake.NewClientBuilder().WithScheme(scheme.Scheme).WithObjects(
		&admissionv1.MutatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: "m"}, Webhooks: []admissionv1.MutatingWebhook{
			{ClientConfig: calls("ns", "hook", "one\n")}, {ClientConfig: calls("ns", "hook", "one")}, {ClientConfig: calls("other", "hook", "x")},
		}},
		&admissionv1.ValidatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: "v"}, Webhooks: []admissionv1.ValidatingWebhook{
			{ClientConfig: calls("ns", "hook", "two")}, {ClientConfig: calls("ns", "missing", "x")}, {ClientConfig: admissionv1.WebhookClientConfig{URL: new("https://a")}},
		}},
		service("ns", "hook"), service("ns", "another"), service("other", "hook"),
	).Build()}
	got, err := c.services(t.Context(), map[string]bool{"ns": true})
	require.NoError(t, err)
	require.Equal(t, []route.Service{{NamespacedName: types.NamespacedName{Namespace: "ns", Name: "hook"}, Selector: selector, CA: []byte("one\ntwo\n")}}, got)
	got, err = c.services(t.Context(), nil)
	require.NoError(t, err)
	require.Empty(t, got)
}
