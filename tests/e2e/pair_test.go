package e2e

import (
	"context"
	"crypto/x509"
	"net"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

// pair is two shards, a and b, with one member each, on two nodes. Of ConfigMaps
// each sees what is in a namespace of its own.
type pair struct {
	namespace string // the members'
	a, b      *member
}

// member is the pod of a shard.
type member struct {
	*corev1.Pod
	owns string // a namespace
}

// newPair makes a pair and waits until both members work. Its pods are changed as
// given before they are made.
func newPair(t *testing.T, change ...func(*corev1.Pod)) *pair {
	t.Helper()
	p := &pair{namespace: namespace(t, "pair")}
	probeRights(t, p.namespace)
	nodes := nodes(t)
	p.a = &member{netPod(p.namespace, "a", nodes[0]), owned(t)}
	p.b = &member{netPod(p.namespace, "b", nodes[len(nodes)-1]), owned(t)}
	for _, m := range []*member{p.a, p.b} {
		for _, f := range change {
			f(m.Pod)
		}
		create(t, shard(p.namespace, m.Name, []string{m.Name}, []string{m.owns}, "configmaps"))
		create(t, m.Pod)
	}
	for _, m := range []*member{p.a, p.b} {
		m.Pod = ready(t, p.namespace, m.Name)
		settled(t, p.namespace, m.Name, 1)
		m.works(t)
	}
	return p
}

// capturedBy chooses how a pod is captured.
func capturedBy(way string) func(*corev1.Pod) {
	return func(pod *corev1.Pod) { pod.Annotations = map[string]string{meshv1alpha1.CaptureAnnotation: way} }
}

// ways are the ways of capture. Each keeps the same promises.
var ways = []string{meshv1alpha1.CaptureEBPF, meshv1alpha1.CaptureIPTables, meshv1alpha1.CaptureAddress}

// owned makes a namespace with an object in it, for a shard to own.
func owned(t *testing.T) string {
	t.Helper()
	ns := namespace(t, "owned")
	create(t, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "here"}})
	return ns
}

// netPod is a pod on the mesh, on a node, with gonet and nc in it: small tools that
// know nothing of Kubernetes and start at once.
func netPod(namespace, name, node string) *corev1.Pod {
	pod := probe(namespace, name, true)
	pod.Spec.NodeName = node
	pod.Spec.TerminationGracePeriodSeconds = new(int64)
	pod.Spec.Containers[0].Image = "localhost/busybox:1"
	pod.Spec.Containers[0].Command = []string{"sleep", "1000000"}
	return pod
}

// outsider makes such a pod that is not on the mesh, all else the same.
func outsider(t *testing.T, namespace, name string) *corev1.Pod {
	t.Helper()
	pod := netPod(namespace, name, nodes(t)[0])
	delete(pod.Labels, meshv1alpha1.EnableProxyLabel)
	create(t, pod)
	return ready(t, namespace, name)
}

// nodes are the names of the cluster's nodes.
func nodes(t *testing.T) []string {
	t.Helper()
	var list corev1.NodeList
	require.NoError(t, cluster.List(t.Context(), &list))
	var names []string
	for _, n := range list.Items {
		names = append(names, n.Name)
	}
	slices.Sort(names)
	require.NotEmpty(t, names)
	return names
}

// account is where a pod finds what it needs to speak with the apiserver.
const account = "/var/run/secrets/kubernetes.io/serviceaccount/"

// apiserver is where pods are told that the apiserver is.
func apiserver(t *testing.T) string {
	t.Helper()
	svc, err := cluster.Clientset.CoreV1().Services("default").Get(t.Context(), "kubernetes", metav1.GetOptions{})
	require.NoError(t, err)
	return net.JoinHostPort(svc.Spec.ClusterIP, "443")
}

// from is how a client in the pod reaches the apiserver: it connects from there,
// trusts whom the pod was told to trust, and shows the pod's own token.
func from(t *testing.T, pod *corev1.Pod) *rest.Config {
	t.Helper()
	return &rest.Config{
		Host:            "https://" + apiserver(t),
		BearerToken:     in(t, pod, "cat", account+"token"),
		TLSClientConfig: rest.TLSClientConfig{CAData: []byte(in(t, pod, "cat", account+"ca.crt"))},
		QPS:             -1,
		Dial: func(ctx context.Context, _, address string) (net.Conn, error) {
			return cluster.DialFrom(ctx, pod, address)
		},
	}
}

// trusts is whom a pod was told to trust.
func trusts(t *testing.T, pod *corev1.Pod) *x509.CertPool {
	t.Helper()
	pool := x509.NewCertPool()
	require.True(t, pool.AppendCertsFromPEM([]byte(in(t, pod, "cat", account+"ca.crt"))))
	return pool
}
