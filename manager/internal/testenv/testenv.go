// Package testenv is what the tests of controllers have in common.
package testenv

import (
	"context"
	"log/slog"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	toolscache "k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/manager/controllers"
	"github.com/ctrlmesh/ctrlmesh/manager/dialect/serve"
)

// Env is an apiserver and what controllers share.
type Env struct {
	Client   *Client
	Cache    *Cache
	Recorder *events.FakeRecorder
	Log      *slog.Logger

	triggers map[string]int
}

// Client is a client that a test may replace.
type Client struct{ client.WithWatch }

// Cache reads from a client, which a test may replace.
type Cache struct {
	cache.Cache
	client.Reader
}

// Get implements client.Reader.
func (c *Cache) Get(ctx context.Context, k client.ObjectKey, o client.Object, opts ...client.GetOption) error {
	return c.Reader.Get(ctx, k, o, opts...)
}

// List implements client.Reader.
func (c *Cache) List(ctx context.Context, o client.ObjectList, opts ...client.ListOption) error {
	return c.Reader.List(ctx, o, opts...)
}

// Pods returns all pods.
func (c *Cache) Pods(ctx context.Context) ([]*corev1.Pod, error) {
	var pods corev1.PodList
	err := c.List(ctx, &pods)
	return collect.Pointers(pods.Items), err
}

// GetInformer implements cache.Informers for pods.
func (c *Cache) GetInformer(ctx context.Context, _ client.Object, _ ...cache.InformerGetOption) (cache.Informer, error) {
	pods, err := c.Pods(ctx)
	if err != nil {
		return nil, err
	}
	store := toolscache.NewStore(toolscache.MetaNamespaceKeyFunc)
	for _, p := range pods {
		_ = store.Add(p) // its key has no errors
	}
	return informer{store: store}, nil
}

type informer struct {
	toolscache.SharedIndexInformer
	store toolscache.Store
}

// GetStore implements toolscache.SharedInformer.
func (i informer) GetStore() toolscache.Store { return i.store }

// New returns an apiserver with objects, and with its own Service.
func New(t *testing.T, objects ...client.Object) *Env {
	t.Helper()
	scheme := runtime.NewScheme()
	require.NoError(t, clientgoscheme.AddToScheme(scheme))
	require.NoError(t, v1alpha1.AddToScheme(scheme))
	require.NoError(t, serve.AddToScheme(scheme))
	c := &Client{fake.NewClientBuilder().WithScheme(scheme).WithObjects(append(objects, &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "kubernetes"},
		Spec:       corev1.ServiceSpec{ClusterIPs: []string{"10.96.0.1"}, Ports: []corev1.ServicePort{{Name: "https", Port: 443}}},
	})...).WithStatusSubresource(append(serve.Objects(), &v1alpha1.ShardingConfig{}, &v1alpha1.CircuitBreaker{}, &v1alpha1.FaultInjection{})...).Build()}
	return &Env{Client: c, Cache: &Cache{Reader: c.WithWatch}, Recorder: events.NewFakeRecorder(100), Log: slog.New(slog.DiscardHandler), triggers: map[string]int{}}
}

// Subscribe counts what triggers controllers.
func (e *Env) Subscribe(all ...controllers.Reconciler) {
	for _, c := range all {
		spec := c.Spec()
		for _, source := range spec.On {
			source.Subscribe(func() { e.triggers[spec.Name]++ })
		}
	}
}

// Triggered reports whether a controller was triggered since the last call.
func (e *Env) Triggered(controller string) bool {
	n := e.triggers[controller]
	e.triggers[controller] = 0
	return n > 0
}

// Get reads an object from the apiserver.
func Get[T client.Object](t *testing.T, e *Env, namespace, name string, into T) T {
	t.Helper()
	require.NoError(t, e.Client.Get(t.Context(), types.NamespacedName{Namespace: namespace, Name: name}, into))
	return into
}

// MemberPod returns a running pod that was admitted to trust a CA.
func MemberPod(name, trust string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "ns", Name: name, UID: types.UID(name), CreationTimestamp: metav1.Now(),
			Labels:      map[string]string{v1alpha1.EnableProxyLabel: "true", "shard": name},
			Annotations: map[string]string{v1alpha1.TrustAnnotation: trust},
		},
		Spec:   corev1.PodSpec{NodeName: "n1"},
		Status: corev1.PodStatus{Phase: corev1.PodRunning},
	}
}
