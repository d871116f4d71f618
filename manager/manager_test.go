package manager

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	kubefake "k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/manager/controllers"
	"github.com/ctrlmesh/ctrlmesh/manager/inject"
	"github.com/ctrlmesh/ctrlmesh/manager/internal/testenv"
	"github.com/ctrlmesh/ctrlmesh/manager/label"
	"github.com/ctrlmesh/ctrlmesh/manager/trust"
)

// testWorld is a leader whose controllers run when a test says so.
type testWorld struct {
	*leader
	*testenv.Env
	specs map[string]controllers.Spec
}

// run runs a controller once.
func (w testWorld) run(controller string) error {
	return w.specs[controller].Reconcile(context.Background())
}

func newWorld(t *testing.T, objects ...client.Object) testWorld {
	t.Helper()
	return newWorldOf(t, false, objects...)
}

// newWorldOf returns a leader that serves the dialects, or not.
func newWorldOf(t *testing.T, dialects bool, objects ...client.Object) testWorld {
	t.Helper()
	env := testenv.New(t, append(objects,
		&admissionv1.MutatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: "ctrlmesh"}, Webhooks: []admissionv1.MutatingWebhook{{Name: "a"}, {Name: "b"}}},
		&admissionv1.ValidatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: "ctrlmesh"}, Webhooks: []admissionv1.ValidatingWebhook{{Name: "a"}}},
	)...)
	r := newReplica(Options{
		Config: &rest.Config{TLSClientConfig: rest.TLSClientConfig{CAData: []byte("cluster\n")}}, Log: env.Log,
		Namespace: "mesh", PodIP: "10.0.0.7", PodName: "m-0", PushAddress: ":8443", ClusterDomain: "cluster.local",
		ManagerService: "ctrlmesh-manager", Webhooks: WebhookOptions{Service: "ctrlmesh-webhook", Configuration: "ctrlmesh"},
		Stamps: StampOptions{Rate: 200, Burst: 400}, Dialects: dialects,
	}, clients{live: liveClient(env.Client, dialects), kube: kubefake.NewClientset()})
	w := testWorld{newLeader(r, env.Cache, env.Recorder), env, map[string]controllers.Spec{}}
	all := w.controllers()
	w.Subscribe(all...)
	for _, c := range all {
		w.specs[c.Spec().Name] = c.Spec()
	}
	require.NoError(t, r.bootstrap(t.Context()))
	require.NoError(t, w.run("addresses"))
	return w
}

func shard(name, value string) *v1alpha1.ShardingConfig {
	return &v1alpha1.ShardingConfig{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: types.UID(name), Generation: 1},
		Spec: v1alpha1.ShardingConfigSpec{
			Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"shard": value}},
			Limits:   []v1alpha1.ObjectLimiter{{RelateResources: []v1alpha1.ResourceGroup{{APIGroups: []string{""}, Resources: []string{"configmaps"}}}}},
		},
	}
}

// From what users wrote to everything that follows from it.
func TestWorld(t *testing.T) {
	ctx := t.Context()
	a := testenv.MemberPod("a", v1alpha1.TrustMesh)
	a.Annotations[v1alpha1.TrustEgressAnnotation] = "true"
	w := newWorld(t, a, testenv.MemberPod("b", v1alpha1.TrustBoth), shard("one", "a"), shard("two", "b"))
	require.NoError(t, w.run("policies"))
	require.Len(t, w.replica.state.Compiled.Load().Policies, 2)
	require.Equal(t, "one", w.replica.state.Compiled.Load().Policies["a"].Sharding.Shard)

	require.NoError(t, w.run("bundles"))
	require.Equal(t, string(w.replica.certificates.Mesh.Bundle()), testenv.Get(t, w.Env, "ns", inject.MeshBundle, &corev1.ConfigMap{}).Data["ca.crt"])
	require.True(t, strings.HasSuffix(testenv.Get(t, w.Env, "ns", inject.BothBundle, &corev1.ConfigMap{}).Data["ca.crt"], "cluster\n"))

	egress := testenv.Get(t, w.Env, "ns", inject.EgressBundle, &corev1.ConfigMap{}).Data
	require.Len(t, egress, 2)
	require.Equal(t, string(w.replica.certificates.Egress.Bundle()), egress["ca.crt"])
	require.Equal(t, w.replica.certificates.Egress.Bundle(), *w.replica.state.EgressBundle.Load())

	require.ErrorContains(t, w.run("stamp"), "apply the manifests of the mesh again")
	require.NoError(t, w.Client.Create(ctx, &admissionv1.MutatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: label.Configuration}}))
	require.NoError(t, w.run("stamp"))
	stamp := testenv.Get(t, w.Env, "", label.Configuration, &admissionv1.MutatingWebhookConfiguration{})
	require.Equal(t, []string{"configmaps"}, stamp.Webhooks[0].Rules[0].Resources)
	require.Equal(t, w.replica.certificates.Serving.Bundle(), stamp.Webhooks[0].ClientConfig.CABundle)
	require.NoError(t, w.run("stamp"))
	require.Equal(t, stamp.ResourceVersion, testenv.Get(t, w.Env, "", label.Configuration, &admissionv1.MutatingWebhookConfiguration{}).ResourceVersion, "nothing to write")

	require.NoError(t, w.run("status"))
	two := testenv.Get(t, w.Env, "ns", "two", &v1alpha1.ShardingConfig{})
	require.EqualValues(t, 1, two.Status.Members)
	require.Contains(t, two.Status.Pods[0].Message, "delete it")
	require.Contains(t, <-w.Recorder.Events, v1alpha1.ReasonOlderThanConfig)
	require.NoError(t, w.run("status"))
	require.Equal(t, two.ResourceVersion, testenv.Get(t, w.Env, "ns", "two", &v1alpha1.ShardingConfig{}).ResourceVersion, "nothing to write")
	require.Empty(t, w.Recorder.Events)

	// The last configuration goes, and so do the rules.
	require.NoError(t, w.Client.Delete(ctx, shard("one", "a")))
	require.NoError(t, w.Client.Delete(ctx, shard("two", "b")))
	require.NoError(t, w.run("policies"))
	require.Nil(t, w.replica.state.Compiled.Load().Policies["a"].Sharding)
	require.NoError(t, w.run("stamp"))
	require.Empty(t, testenv.Get(t, w.Env, "", label.Configuration, &admissionv1.MutatingWebhookConfiguration{}).Webhooks)
}

// laggingCache returns ShardingConfigs as they were.
type laggingCache struct {
	client.Reader
	configs map[string]*v1alpha1.ShardingConfig
}

func (c laggingCache) Get(ctx context.Context, k client.ObjectKey, o client.Object, opts ...client.GetOption) error {
	if config, ok := o.(*v1alpha1.ShardingConfig); ok && c.configs[k.Name] != nil {
		c.configs[k.Name].DeepCopyInto(config)
		return nil
	}
	return c.Reader.Get(ctx, k, o, opts...)
}

// The cache lags behind the writes of statuses. Further writes must not conflict with them.
func TestStatusWritesDoNotConflict(t *testing.T) {
	ctx := t.Context()
	w := newWorld(t, testenv.MemberPod("a", v1alpha1.TrustMesh), shard("one", "a"))
	read := func() *v1alpha1.ShardingConfig { return testenv.Get(t, w.Env, "ns", "one", &v1alpha1.ShardingConfig{}) }
	lagging := laggingCache{w.Client, map[string]*v1alpha1.ShardingConfig{"one": read()}}
	w.Cache.Reader = lagging
	for n := range 6 {
		before := read()
		pod := testenv.MemberPod(fmt.Sprintf("pod-%d", n), v1alpha1.TrustMesh)
		pod.Labels["shard"] = "a"
		require.NoError(t, w.Client.Create(ctx, pod))
		require.NoError(t, w.run("policies"))
		require.NoError(t, w.run("status"))
		if n%2 == 1 {
			lagging.configs["one"] = before // the write before the last one has arrived
		}
	}
	require.EqualValues(t, 7, read().Status.Members)
}

func TestKeepTrust(t *testing.T) {
	ctx := t.Context()
	w := newWorld(t)
	require.NoError(t, w.run("trust"))
	require.Equal(t, string(w.replica.certificates.Serving.Bundle()), testenv.Get(t, w.Env, "mesh", meshv1.ManagerCAConfigMap, &corev1.ConfigMap{}).Data["ca.crt"])
	mutating := testenv.Get(t, w.Env, "", "ctrlmesh", &admissionv1.MutatingWebhookConfiguration{})
	require.Equal(t, w.replica.certificates.Serving.Bundle(), mutating.Webhooks[0].ClientConfig.CABundle)
	require.Equal(t, w.replica.certificates.Serving.Bundle(), mutating.Webhooks[1].ClientConfig.CABundle)
	require.Equal(t, w.replica.certificates.Serving.Bundle(), testenv.Get(t, w.Env, "", "ctrlmesh", &admissionv1.ValidatingWebhookConfiguration{}).Webhooks[0].ClientConfig.CABundle)
	require.NoError(t, w.replica.ready(nil))

	// An apiserver's address is added: a new certificate of the same CA.
	before := w.replica.certificates.Mesh.Bundle()
	https, port := "https", int32(6443)
	require.NoError(t, w.Client.Create(ctx, &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "kubernetes", Labels: map[string]string{discoveryv1.LabelServiceName: "kubernetes"}},
		Ports:      []discoveryv1.EndpointPort{{Name: &https, Port: &port}},
		Endpoints:  []discoveryv1.Endpoint{{Addresses: []string{"192.0.2.1"}}},
	}))
	require.NoError(t, w.run("policies"))
	require.Contains(t, w.replica.apiServerNames().IPs, netip.MustParseAddr("192.0.2.1"))
	require.True(t, w.Triggered("trust"))
	w.Triggered("bundles")
	require.NoError(t, w.run("trust"))
	require.True(t, strings.HasPrefix(string(w.replica.certificates.Mesh.Bundle()), string(before)), "the old one signs")
	require.True(t, w.Triggered("bundles"))

	// It waits until the bundles notify it.
	ca := func() *corev1.Secret { return testenv.Get(t, w.Env, "mesh", trust.MeshCASecret, &corev1.Secret{}) }
	require.NoError(t, w.run("trust"))
	require.Contains(t, ca().Annotations[trust.RotationAnnotation], "is being put into the bundles")
	require.NoError(t, w.run("bundles"))
	require.True(t, w.Triggered("trust"))
	require.NoError(t, w.run("trust"))
	require.Contains(t, ca().Annotations[trust.RotationAnnotation], "the next CA signs when")
}

// The agents' Service is sent to agents, and named in their certificates.
func TestAgentsService(t *testing.T) {
	ctx := t.Context()
	w := newWorld(t)
	require.NoError(t, w.Client.Create(ctx, &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "mesh", Name: "ctrlmesh-agent"},
		Spec:       corev1.ServiceSpec{ClusterIPs: []string{"10.96.0.9"}, Ports: []corev1.ServicePort{{Port: 6443}}},
	}))
	require.NoError(t, w.run("policies"))
	require.Equal(t, []string{"10.96.0.9:6443"}, w.replica.state.Cluster.Load().AgentAddresses)
	require.Contains(t, w.replica.apiServerNames().IPs, netip.MustParseAddr("10.96.0.9"))
	require.True(t, w.Triggered("trust"))
}

// A rotation waits for pods that trust the mesh and may not know the next CA.
func TestARotationWaitsForPods(t *testing.T) {
	ctx := t.Context()
	ended, outsider := testenv.MemberPod("ended", v1alpha1.TrustMesh), testenv.MemberPod("outsider", "")
	ended.Status.Phase = corev1.PodSucceeded
	w := newWorld(t, testenv.MemberPod("member", v1alpha1.TrustMesh), testenv.MemberPod("other", v1alpha1.TrustBoth), ended, outsider)
	ca := testenv.Get(t, w.Env, "mesh", trust.MeshCASecret, &corev1.Secret{})
	ca.Annotations = map[string]string{trust.RotateAnnotation: "now"}
	require.NoError(t, w.Client.Update(ctx, ca))
	require.NoError(t, w.run("trust"))
	require.NoError(t, w.run("policies"))
	require.NoError(t, w.run("bundles"))
	require.Equal(t, 2, strings.Count(testenv.Get(t, w.Env, "ns", inject.MeshBundle, &corev1.ConfigMap{}).Data["ca.crt"], "BEGIN"))
	require.NoError(t, w.run("trust"))
	message := testenv.Get(t, w.Env, "mesh", trust.MeshCASecret, &corev1.Secret{}).Annotations[trust.RotationAnnotation]
	require.True(t, strings.HasSuffix(message, ": delete ns/member, ns/other"), message)
}

// An agent asks for a leaf when it hears of an address, before anything else here
// has looked at it.
func TestLeavesNameWhatAgentsWereSent(t *testing.T) {
	w := newWorld(t)
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	csr, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, key)
	require.NoError(t, err)
	service := testenv.Get(t, w.Env, "default", "kubernetes", &corev1.Service{})
	for _, ip := range []string{"10.96.0.2", "10.96.0.1"} { // it goes, and comes back
		service.Spec.ClusterIPs = []string{ip}
		require.NoError(t, w.Client.Update(t.Context(), service))
		require.NoError(t, w.run("policies"))
		chain, err := w.replica.certificates.Mesh.Sign(csr)
		require.NoError(t, err)
		leaf, err := x509.ParseCertificate(chain[0])
		require.NoError(t, err)
		require.Equal(t, ip == "10.96.0.1", leaf.VerifyHostname("10.96.0.1") == nil)
	}
}

// Agents are not sent an empty apiserver when its Service cannot be read.
func TestLastAddressesStay(t *testing.T) {
	w := newWorld(t)
	known := w.replica.state.Cluster.Load()
	require.NoError(t, w.Client.Delete(t.Context(), &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "kubernetes"}}))
	require.Error(t, w.run("policies"))
	require.Same(t, known, w.replica.state.Cluster.Load())
	require.NotNil(t, w.replica.state.Compiled.Load(), "policies go on")
}
