package manager

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"flag"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/time/rate"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/manager/inject"
	"github.com/ctrlmesh/ctrlmesh/manager/label"
	"github.com/ctrlmesh/ctrlmesh/manager/push"
	"github.com/ctrlmesh/ctrlmesh/manager/roots"
	"github.com/ctrlmesh/ctrlmesh/manager/status"
	"github.com/ctrlmesh/ctrlmesh/manager/trust"
)

func TestOptions(t *testing.T) {
	var o Options
	o.AddFlags(flag.NewFlagSet("", flag.ContinueOnError), func(k string) string {
		return map[string]string{"POD_NAMESPACE": "mesh", "POD_IP": "10.0.0.7"}[k]
	})
	require.NoError(t, o.validate())
	o.PodIP = "x"
	require.ErrorContains(t, o.validate(), "POD_IP")
	o.Namespace = "default"
	require.ErrorContains(t, o.validate(), "one of its own")
	o.Namespace = ""
	require.ErrorContains(t, o.validate(), "POD_NAMESPACE")
}

func TestSlimPod(t *testing.T) {
	out, err := slimPod(&corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "p", Annotations: map[string]string{v1alpha1.TrustAnnotation: "mesh", v1alpha1.EgressTrustAnnotation: "true", "secret": "x"}},
		Spec:       corev1.PodSpec{NodeName: "n", Containers: []corev1.Container{{Name: "c"}}},
		Status: corev1.PodStatus{Phase: corev1.PodRunning, PodIP: "10.0.0.1", Conditions: []corev1.PodCondition{
			{Type: corev1.PodScheduled, Status: corev1.ConditionTrue}, {Type: corev1.PodReady, Status: corev1.ConditionTrue, Reason: "x"},
		}},
	})
	require.NoError(t, err)
	require.Equal(t, &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "p", Annotations: map[string]string{v1alpha1.TrustAnnotation: "mesh", v1alpha1.EgressTrustAnnotation: "true"}},
		Spec:       corev1.PodSpec{NodeName: "n"},
		Status:     corev1.PodStatus{Phase: corev1.PodRunning, PodIP: "10.0.0.1", Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}},
	}, out)
}

// Status that the manager writes wakes no loop that would write it again.
func TestWhatWakesThePoliciesLoop(t *testing.T) {
	b := &v1alpha1.CircuitBreaker{ObjectMeta: metav1.ObjectMeta{UID: "1", Generation: 1}}
	f := &v1alpha1.FaultInjection{ObjectMeta: metav1.ObjectMeta{UID: "1", Generation: 1}}
	n := metadataOf(namespaceKind)
	for _, c := range []struct {
		what   string
		before any
		change func(any)
		wakes  bool
	}{
		{"status", b, func(o any) { o.(*v1alpha1.CircuitBreaker).Status.Refused++ }, false},
		{"annotation", b, func(o any) { o.(*v1alpha1.CircuitBreaker).Annotations = map[string]string{"a": "b"} }, false},
		{"recover", b, func(o any) {
			o.(*v1alpha1.CircuitBreaker).Annotations = map[string]string{v1alpha1.RecoverAnnotation: "1"}
		}, true},
		{"disable", b, func(o any) {
			o.(*v1alpha1.CircuitBreaker).Labels = map[string]string{v1alpha1.DisableBreakerLabel: ""}
		}, true},
		{"spec", b, func(o any) { o.(*v1alpha1.CircuitBreaker).Generation++ }, true},
		{"status", f, func(o any) { o.(*v1alpha1.FaultInjection).Status.Injected++ }, false},
		{"expiry", f, func(o any) { o.(*v1alpha1.FaultInjection).Status.ExpirationGeneration++ }, true},
		{"namespace", n, func(o any) { o.(*metav1.PartialObjectMetadata).ResourceVersion = "2" }, false},
		{"no faults", n, func(o any) {
			o.(*metav1.PartialObjectMetadata).Labels = map[string]string{v1alpha1.NoFaultsLabel: ""}
		}, true},
	} {
		after := c.before.(runtime.Object).DeepCopyObject()
		c.change(after)
		require.Equal(t, !c.wakes, sameMeaning(c.before, after), "%s of %T", c.what, c.before)
	}
}

// asCache lets the loops read from a client as they do from the cache.
type asCache struct {
	cache.Cache
	client.Client
}

func (c asCache) Get(ctx context.Context, k client.ObjectKey, o client.Object, opts ...client.GetOption) error {
	return c.Client.Get(ctx, k, o, opts...)
}

func (c asCache) List(ctx context.Context, o client.ObjectList, opts ...client.ListOption) error {
	return c.Client.List(ctx, o, opts...)
}

// testWorld counts what triggers its controllers.
type testWorld struct {
	*world
	triggers map[string]int
}

// triggered reports whether a controller was triggered since the last call.
func (w testWorld) triggered(controller string) bool {
	n := w.triggers[controller]
	w.triggers[controller] = 0
	return n > 0
}

func newWorld(t *testing.T, objects ...client.Object) (testWorld, *events.FakeRecorder) {
	t.Helper()
	scheme := runtime.NewScheme()
	require.NoError(t, clientgoscheme.AddToScheme(scheme))
	require.NoError(t, v1alpha1.AddToScheme(scheme))
	objects = append(objects,
		&corev1.Service{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "kubernetes"},
			Spec:       corev1.ServiceSpec{ClusterIPs: []string{"10.96.0.1"}, Ports: []corev1.ServicePort{{Name: "https", Port: 443}}},
		},
		&admissionv1.MutatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: "ctrlmesh"}, Webhooks: []admissionv1.MutatingWebhook{{Name: "a"}, {Name: "b"}}},
		&admissionv1.ValidatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: "ctrlmesh"}, Webhooks: []admissionv1.ValidatingWebhook{{Name: "a"}}},
	)
	c := fake.NewClientBuilder().WithScheme(scheme).WithObjects(objects...).WithStatusSubresource(&v1alpha1.ShardingConfig{}, &v1alpha1.CircuitBreaker{}, &v1alpha1.FaultInjection{}).Build()
	recorder := events.NewFakeRecorder(100)
	log := slog.New(slog.DiscardHandler)
	w := testWorld{triggers: map[string]int{}}
	w.world = &world{
		Options: Options{
			Config: &rest.Config{TLSClientConfig: rest.TLSClientConfig{CAData: []byte("cluster\n")}}, Log: log,
			Namespace: "mesh", PodIP: "10.0.0.7", PodName: "m-0", PushAddress: ":8443", ClusterDomain: "cluster.local",
			ManagerService: "ctrlmesh-manager", WebhookService: "ctrlmesh-webhook", WebhookConfiguration: "ctrlmesh",
		},
		live: c, cache: asCache{Client: c}, recorder: recorder,
		serving: &trust.Serving{Client: c, Namespace: "mesh", Names: trust.ManagerNames("mesh", "cluster.local", "ctrlmesh-webhook")},
		push:    &push.Server{},
		sweeper: &label.Sweeper{Limiter: rate.NewLimiter(rate.Inf, 1)},
	}
	w.authority = &trust.Authority{Client: c, Namespace: "mesh", Names: w.apiServerNames}
	w.egress = &trust.Authority{Client: c, Namespace: "mesh", Names: w.apiServerNames, Egress: true}
	w.weigher = &roots.Weigher{}
	w.roots = &roots.Roots{Client: c, Observe: w.push.Observe, Recorder: recorder, Weigher: w.weigher}
	w.bundles = &inject.Bundles{Client: c, Mesh: w.authority.Bundle, Cluster: w.clusterCA, Egress: w.egress.Bundle}
	for _, s := range w.controllers() {
		for _, source := range s.On {
			source.Subscribe(func() { w.triggers[s.Name]++ })
		}
	}
	require.NoError(t, w.bootstrap(t.Context()))
	return w, recorder
}

func get[T client.Object](t *testing.T, w testWorld, namespace, name string, into T) T {
	t.Helper()
	require.NoError(t, w.live.Get(t.Context(), types.NamespacedName{Namespace: namespace, Name: name}, into))
	return into
}

func memberPod(name, trust string) *corev1.Pod {
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

func shard(name, value string) *v1alpha1.ShardingConfig {
	return &v1alpha1.ShardingConfig{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: types.UID(name), Generation: 1},
		Spec: v1alpha1.ShardingConfigSpec{
			Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"shard": value}},
			Limits:   []v1alpha1.ObjectLimiter{{RelateResources: []v1alpha1.ResourceGroup{{APIGroups: []string{""}, Resources: []string{"pods"}}}}},
		},
	}
}

// From what users wrote to everything that follows from it.
func TestWorld(t *testing.T) {
	ctx := t.Context()
	a := memberPod("a", v1alpha1.TrustMesh)
	a.Annotations[v1alpha1.TrustEgressAnnotation] = "true"
	w, recorder := newWorld(t, a, memberPod("b", v1alpha1.TrustBoth), shard("one", "a"), shard("two", "b"))
	require.NoError(t, w.policies(ctx))
	require.Len(t, w.Compiled.Load().Policies, 2)
	require.Equal(t, "one", w.Compiled.Load().Policies["a"].Sharding.Shard)

	require.NoError(t, w.keepBundles(ctx))
	require.Equal(t, string(w.authority.Bundle()), get(t, w, "ns", inject.MeshBundle, &corev1.ConfigMap{}).Data["ca.crt"])
	require.True(t, strings.HasSuffix(get(t, w, "ns", inject.BothBundle, &corev1.ConfigMap{}).Data["ca.crt"], "cluster\n"))

	egress := get(t, w, "ns", inject.EgressBundle, &corev1.ConfigMap{}).Data
	require.Len(t, egress, 2)
	require.Equal(t, string(w.egress.Bundle()), egress["ca.crt"])
	require.Equal(t, w.egress.Bundle(), *w.EgressBundle.Load())

	require.ErrorContains(t, w.keepStamp(ctx), "apply the manifests of the mesh again")
	require.NoError(t, w.live.Create(ctx, &admissionv1.MutatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: label.Configuration}}))
	require.NoError(t, w.keepStamp(ctx))
	stamp := get(t, w, "", label.Configuration, &admissionv1.MutatingWebhookConfiguration{})
	require.Equal(t, []string{"pods"}, stamp.Webhooks[0].Rules[0].Resources)
	require.Equal(t, w.serving.Bundle(), stamp.Webhooks[0].ClientConfig.CABundle)
	require.NoError(t, w.keepStamp(ctx))
	require.Equal(t, stamp.ResourceVersion, get(t, w, "", label.Configuration, &admissionv1.MutatingWebhookConfiguration{}).ResourceVersion, "nothing to write")

	require.NoError(t, w.keepStatus(ctx))
	two := get(t, w, "ns", "two", &v1alpha1.ShardingConfig{})
	require.EqualValues(t, 1, two.Status.Members)
	require.Contains(t, two.Status.Pods[0].Message, "delete it")
	require.Contains(t, <-recorder.Events, v1alpha1.ReasonOlderThanConfig)
	require.NoError(t, w.keepStatus(ctx))
	require.Equal(t, two.ResourceVersion, get(t, w, "ns", "two", &v1alpha1.ShardingConfig{}).ResourceVersion, "nothing to write")
	require.Empty(t, recorder.Events)

	// The last configuration goes, and so do the rules.
	require.NoError(t, w.live.Delete(ctx, shard("one", "a")))
	require.NoError(t, w.live.Delete(ctx, shard("two", "b")))
	require.NoError(t, w.policies(ctx))
	require.Nil(t, w.Compiled.Load().Policies["a"].Sharding)
	require.NoError(t, w.keepStamp(ctx))
	require.Empty(t, get(t, w, "", label.Configuration, &admissionv1.MutatingWebhookConfiguration{}).Webhooks)
}

// laggingCache returns ShardingConfigs as they were.
type laggingCache struct {
	asCache
	configs map[string]*v1alpha1.ShardingConfig
}

func (c laggingCache) Get(ctx context.Context, k client.ObjectKey, o client.Object, opts ...client.GetOption) error {
	if config, ok := o.(*v1alpha1.ShardingConfig); ok && c.configs[k.Name] != nil {
		c.configs[k.Name].DeepCopyInto(config)
		return nil
	}
	return c.asCache.Get(ctx, k, o, opts...)
}

// The cache lags behind the writes of statuses. Further writes must not conflict with them.
func TestStatusWritesDoNotConflict(t *testing.T) {
	ctx := t.Context()
	w, _ := newWorld(t, memberPod("a", v1alpha1.TrustMesh), shard("one", "a"))
	read := func() *v1alpha1.ShardingConfig { return get(t, w, "ns", "one", &v1alpha1.ShardingConfig{}) }
	lagging := laggingCache{w.cache.(asCache), map[string]*v1alpha1.ShardingConfig{"one": read()}}
	w.cache = lagging
	for n := range 6 {
		before := read()
		pod := memberPod(fmt.Sprintf("pod-%d", n), v1alpha1.TrustMesh)
		pod.Labels["shard"] = "a"
		require.NoError(t, w.live.Create(ctx, pod))
		require.NoError(t, w.policies(ctx))
		require.NoError(t, w.keepStatus(ctx))
		if n%2 == 1 {
			lagging.configs["one"] = before // the write before the last one has arrived
		}
	}
	require.EqualValues(t, 7, read().Status.Members)
}

func TestKeepTrust(t *testing.T) {
	ctx := t.Context()
	w, _ := newWorld(t)
	require.NoError(t, w.keepTrust(ctx))
	require.Equal(t, string(w.serving.Bundle()), get(t, w, "mesh", meshv1.ManagerCAConfigMap, &corev1.ConfigMap{}).Data["ca.crt"])
	mutating := get(t, w, "", "ctrlmesh", &admissionv1.MutatingWebhookConfiguration{})
	require.Equal(t, w.serving.Bundle(), mutating.Webhooks[0].ClientConfig.CABundle)
	require.Equal(t, w.serving.Bundle(), mutating.Webhooks[1].ClientConfig.CABundle)
	require.Equal(t, w.serving.Bundle(), get(t, w, "", "ctrlmesh", &admissionv1.ValidatingWebhookConfiguration{}).Webhooks[0].ClientConfig.CABundle)
	require.NoError(t, w.ready(nil))

	// An apiserver's address is added: a new certificate of the same CA.
	before := w.authority.Bundle()
	https, port := "https", int32(6443)
	require.NoError(t, w.live.Create(ctx, &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "kubernetes", Labels: map[string]string{discoveryv1.LabelServiceName: "kubernetes"}},
		Ports:      []discoveryv1.EndpointPort{{Name: &https, Port: &port}},
		Endpoints:  []discoveryv1.Endpoint{{Addresses: []string{"192.0.2.1"}}},
	}))
	require.NoError(t, w.policies(ctx))
	require.Contains(t, w.apiServerNames().IPs, netip.MustParseAddr("192.0.2.1"))
	require.True(t, w.triggered("trust"))
	w.triggered("bundles")
	require.NoError(t, w.keepTrust(ctx))
	require.True(t, strings.HasPrefix(string(w.authority.Bundle()), string(before)), "the old one signs")
	require.True(t, w.triggered("bundles"))

	// It waits for the bundles, and they tell it.
	ca := func() *corev1.Secret { return get(t, w, "mesh", trust.MeshCASecret, &corev1.Secret{}) }
	require.NoError(t, w.keepTrust(ctx))
	require.Contains(t, ca().Annotations[trust.RotationAnnotation], "is being put into the bundles")
	require.NoError(t, w.keepBundles(ctx))
	require.True(t, w.triggered("trust"))
	require.NoError(t, w.keepTrust(ctx))
	require.Contains(t, ca().Annotations[trust.RotationAnnotation], "the next CA signs when")
}

// The agents' Service is told to agents, and named in their certificates.
func TestAgentsService(t *testing.T) {
	ctx := t.Context()
	w, _ := newWorld(t)
	require.NoError(t, w.live.Create(ctx, &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "mesh", Name: "ctrlmesh-agent"},
		Spec:       corev1.ServiceSpec{ClusterIPs: []string{"10.96.0.9"}, Ports: []corev1.ServicePort{{Port: 6443}}},
	}))
	require.NoError(t, w.policies(ctx))
	require.Equal(t, []string{"10.96.0.9:6443"}, w.Cluster.Load().AgentAddresses)
	require.Contains(t, w.apiServerNames().IPs, netip.MustParseAddr("10.96.0.9"))
	require.True(t, w.triggered("trust"))
}

// What a new leader has not heard yet does not undo what the last one wrote.
func TestKeepNodes(t *testing.T) {
	ctx := t.Context()
	w, _ := newWorld(t)
	require.NoError(t, inject.KeepHostNetwork(ctx, w.live, "mesh", inject.HostNetwork(true, nil)))
	data := func() map[string]string {
		return get(t, w, "mesh", inject.HostNetworkConfigMap, &corev1.ConfigMap{}).Data
	}
	require.NoError(t, w.keepNodes(ctx))
	require.Equal(t, inject.HostNetwork(true, nil), data())
	w.leading = time.Now().Add(-2 * status.Grace)
	require.NoError(t, w.keepNodes(ctx))
	require.Equal(t, inject.HostNetwork(false, nil), data())
}

// A rotation waits for pods that trust the mesh and may not know the next CA.
func TestARotationWaitsForPods(t *testing.T) {
	ctx := t.Context()
	ended, outsider := memberPod("ended", v1alpha1.TrustMesh), memberPod("outsider", "")
	ended.Status.Phase = corev1.PodSucceeded
	w, _ := newWorld(t, memberPod("member", v1alpha1.TrustMesh), memberPod("other", v1alpha1.TrustBoth), ended, outsider)
	require.Nil(t, w.trusting(func(*corev1.Pod) bool { return true }), "not known yet")
	ca := get(t, w, "mesh", trust.MeshCASecret, &corev1.Secret{})
	ca.Annotations = map[string]string{trust.RotateAnnotation: "now"}
	require.NoError(t, w.live.Update(ctx, ca))
	require.NoError(t, w.keepTrust(ctx))
	require.NoError(t, w.policies(ctx))
	require.NoError(t, w.keepBundles(ctx))
	require.Equal(t, 2, strings.Count(get(t, w, "ns", inject.MeshBundle, &corev1.ConfigMap{}).Data["ca.crt"], "BEGIN"))
	require.NoError(t, w.keepTrust(ctx))
	message := get(t, w, "mesh", trust.MeshCASecret, &corev1.Secret{}).Annotations[trust.RotationAnnotation]
	require.True(t, strings.HasSuffix(message, ": delete ns/member, ns/other"), message)
}

// An agent asks for a leaf when it hears of an address, before anything else here
// has looked at it.
func TestLeavesNameWhatAgentsWereTold(t *testing.T) {
	w, _ := newWorld(t)
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	csr, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, key)
	require.NoError(t, err)
	service := get(t, w, "default", "kubernetes", &corev1.Service{})
	for _, ip := range []string{"10.96.0.2", "10.96.0.1"} { // it goes, and comes back
		service.Spec.ClusterIPs = []string{ip}
		require.NoError(t, w.live.Update(t.Context(), service))
		require.NoError(t, w.policies(t.Context()))
		chain, err := w.authority.Sign(csr)
		require.NoError(t, err)
		leaf, err := x509.ParseCertificate(chain[0])
		require.NoError(t, err)
		require.Equal(t, ip == "10.96.0.1", leaf.VerifyHostname("10.96.0.1") == nil)
	}
}

// Agents are not told to forget the apiserver when its Service cannot be read.
func TestLastAddressesStay(t *testing.T) {
	w, _ := newWorld(t)
	known := w.Cluster.Load()
	require.NoError(t, w.live.Delete(t.Context(), &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "kubernetes"}}))
	require.Error(t, w.policies(t.Context()))
	require.Same(t, known, w.Cluster.Load())
	require.NotNil(t, w.Compiled.Load(), "policies go on")
}

func TestKeepEndpoint(t *testing.T) {
	ctx := t.Context()
	w, _ := newWorld(t)
	require.NoError(t, w.keepEndpoint(ctx))
	e := get(t, w, "mesh", "ctrlmesh-manager-leader", &discoveryv1.EndpointSlice{})
	require.Equal(t, "ctrlmesh-manager", e.Labels[discoveryv1.LabelServiceName])
	require.Equal(t, []string{"10.0.0.7"}, e.Endpoints[0].Addresses)
	require.EqualValues(t, 8443, *e.Ports[0].Port)
	require.Equal(t, "mesh", *e.Ports[0].Name)
	require.NoError(t, w.keepEndpoint(ctx))
	require.Equal(t, e.ResourceVersion, get(t, w, "mesh", e.Name, &discoveryv1.EndpointSlice{}).ResourceVersion)

	w.PodIP = "fd00::7" // another leader, of another family
	require.NoError(t, w.keepEndpoint(ctx))
	e = get(t, w, "mesh", e.Name, &discoveryv1.EndpointSlice{})
	require.Equal(t, discoveryv1.AddressTypeIPv6, e.AddressType)
	require.Equal(t, []string{"fd00::7"}, e.Endpoints[0].Addresses)
}
