package stamp

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/time/rate"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/controllers"
	"github.com/ctrlmesh/ctrlmesh/manager/internal/testenv"
	"github.com/ctrlmesh/ctrlmesh/manager/label"
	"github.com/ctrlmesh/ctrlmesh/manager/platform"
)

type world struct {
	*testenv.Env
	*Controller
	now time.Time
}

// newWorld returns a controller and a configuration of ConfigMaps and Pods.
func newWorld(t *testing.T) *world {
	t.Helper()
	namespaces := func(name string) *corev1.Namespace {
		return &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}
	}
	env := testenv.New(t, namespaces("ns"), namespaces("kube-system"), namespaces("mesh"),
		&admissionv1.MutatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: label.Configuration, Annotations: map[string]string{"a": "b"}}})
	w := &world{Env: env, now: time.Unix(1000, 0)}
	w.Controller = &Controller{
		Client: env.Client, Service: types.NamespacedName{Namespace: "mesh", Name: "webhook"}, CA: func() []byte { return []byte("ca") },
		State:      &controllers.State{},
		Namespaces: &label.Namespaces{Client: env.Client, Cache: env.Client, Limiter: rate.NewLimiter(rate.Inf, 1)},
		Sweeper:    &label.Sweeper{Settings: platform.Default},
		Now:        func() time.Time { return w.now },
	}
	w.State.Settings.Store(platform.Default())
	w.stamp("configmaps", "pods")
	return w
}

// stamp sets the resources that a configuration divides.
func (w *world) stamp(resources ...string) {
	c := &v1alpha1.ShardingConfig{Spec: v1alpha1.ShardingConfigSpec{Limits: []v1alpha1.ObjectLimiter{{
		RelateResources: []v1alpha1.ResourceGroup{{APIGroups: []string{""}, Resources: resources}},
	}}}}
	w.State.Compiled.Store(&controllers.Compiled{Result: compile.Result{}, Listed: &controllers.Listed{Configs: []*v1alpha1.ShardingConfig{c}}})
}

// install installs the policy and its binding now.
func (w *world) install(t *testing.T) {
	t.Helper()
	meta := metav1.ObjectMeta{Name: label.Configuration, CreationTimestamp: metav1.NewTime(w.now)}
	require.NoError(t, w.Env.Client.Create(t.Context(), &admissionv1.MutatingAdmissionPolicy{ObjectMeta: meta}))
	require.NoError(t, w.Env.Client.Create(t.Context(), &admissionv1.MutatingAdmissionPolicyBinding{ObjectMeta: meta}))
}

// written runs the controller, and returns what the policy and the webhook stamp.
func (w *world) written(t *testing.T) (policy string, webhook []string) {
	t.Helper()
	require.NoError(t, w.Reconcile(t.Context()))
	c := testenv.Get(t, w.Env, "", label.Configuration, &admissionv1.MutatingWebhookConfiguration{})
	require.Equal(t, "b", c.Annotations["a"])
	for _, one := range c.Webhooks {
		webhook = append(webhook, one.Rules[0].Resources...)
	}
	return c.Annotations[v1alpha1.StampedAnnotation], webhook
}

func (w *world) bucket(t *testing.T, namespace string) string {
	t.Helper()
	return testenv.Get(t, w.Env, "", namespace, &corev1.Namespace{}).Labels[v1alpha1.ShardingHashLabel]
}

func TestPolicyReplacesWebhookWithoutGap(t *testing.T) {
	w := newWorld(t)
	policy, webhook := w.written(t)
	require.Empty(t, policy)
	require.Equal(t, []string{"configmaps"}, webhook)
	require.Empty(t, w.bucket(t, "ns"), "no policy copies it")

	w.install(t)
	policy, webhook = w.written(t)
	require.Equal(t, "configmaps,pods", policy)
	require.Equal(t, []string{"configmaps"}, webhook, "not all apiservers may evaluate the policy yet")
	require.Equal(t, label.Of("ns")[v1alpha1.ShardingHashLabel], w.bucket(t, "ns"))
	require.Empty(t, w.bucket(t, "kube-system"), "excluded")
	require.Empty(t, w.bucket(t, "mesh"))

	w.stamp("services")
	policy, webhook = w.written(t)
	require.Equal(t, "services", policy)
	require.Equal(t, []string{"configmaps"}, webhook, "a policy refuses other rules")

	w.now = w.now.Add(controllers.PolicyDelay)
	policy, webhook = w.written(t)
	require.Equal(t, "services", policy)
	require.Empty(t, webhook)

	w.State.Compiled.Store(&controllers.Compiled{Listed: &controllers.Listed{}})
	policy, webhook = w.written(t)
	require.Empty(t, policy)
	require.Empty(t, webhook)
}

// Anybody who may write a configuration can name resources that do not exist.
func TestInventedResourcesLeaveRoomForServedOnes(t *testing.T) {
	w := newWorld(t)
	w.install(t)
	w.now = w.now.Add(controllers.PolicyDelay)
	w.Sweeper.Served = func() ([]*metav1.APIResourceList, error) {
		return []*metav1.APIResourceList{{GroupVersion: "v1", APIResources: []metav1.APIResource{{Name: "configmaps", Namespaced: true, Verbs: metav1.Verbs{"list", "patch"}}}}}, nil
	}
	w.stamp("configmaps", "widgets")
	policy, _ := w.written(t)
	require.Equal(t, "configmaps,widgets", policy, "it may be served soon")

	invented := make([]string, 10_000)
	for i := range invented {
		invented[i] = fmt.Sprintf("invented-resource-%d", i)
	}
	w.stamp(append(invented, "configmaps")...)
	policy, _ = w.written(t)
	require.Equal(t, "configmaps", policy)
}

func TestWebhookReturnsWithoutPolicy(t *testing.T) {
	w := newWorld(t)
	w.install(t)
	w.now = w.now.Add(controllers.PolicyDelay)
	_, webhook := w.written(t)
	require.Empty(t, webhook)
	require.NoError(t, w.Env.Client.Delete(t.Context(), &admissionv1.MutatingAdmissionPolicyBinding{ObjectMeta: metav1.ObjectMeta{Name: label.Configuration}}))
	policy, webhook := w.written(t)
	require.Empty(t, policy)
	require.Equal(t, []string{"configmaps"}, webhook)
}

// failing patches nothing.
type failing struct{ client.Client }

func (failing) Patch(context.Context, client.Object, client.Patch, ...client.PatchOption) error {
	return errors.New("refused")
}

func TestWebhookStaysWhileNamespacesLackLabels(t *testing.T) {
	w := newWorld(t)
	_, webhook := w.written(t)
	w.install(t)
	w.now = w.now.Add(controllers.PolicyDelay)
	w.Namespaces.Client = failing{w.Env.Client}
	require.ErrorContains(t, w.Reconcile(t.Context()), "labelling namespace ns")
	c := testenv.Get(t, w.Env, "", label.Configuration, &admissionv1.MutatingWebhookConfiguration{})
	require.Equal(t, "configmaps,pods", c.Annotations[v1alpha1.StampedAnnotation])
	require.Equal(t, webhook, c.Webhooks[0].Rules[0].Resources)
}
