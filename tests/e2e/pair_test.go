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

// pair is two shards, a and b, with one member each, on two nodes. Each sees the ConfigMaps
// of a namespace of its own.
type pair struct {
	namespace string // the members'
	a, b      *member
}

// member is the pod of a shard.
type member struct {
	*corev1.Pod
	owns string // a namespace
}

// newPair creates a pair and waits until both members work. It applies the changes to the
// pods before it creates them.
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

// capturedBy sets a pod's capture mode.
func capturedBy(way string) func(*corev1.Pod) {
	return func(pod *corev1.Pod) { pod.Annotations = map[string]string{meshv1alpha1.CaptureAnnotation: way} }
}

// captureModes are all capture modes; each has the same guarantees.
var captureModes = []string{meshv1alpha1.CaptureEBPF, meshv1alpha1.CaptureIPTables, meshv1alpha1.CaptureAddress}

// owned creates a namespace with an object in it, for a shard to own.
func owned(t *testing.T) string {
	t.Helper()
	ns := namespace(t, "owned")
	create(t, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "here"}})
	return ns
}

// netPod returns a pod on the mesh, on a node, with gonet and nc: small tools that do not
// use Kubernetes and start at once.
func netPod(namespace, name, node string) *corev1.Pod {
	pod := probe(namespace, name, true)
	pod.Spec.NodeName = node
	pod.Spec.TerminationGracePeriodSeconds = new(int64)
	pod.Spec.Containers[0].Image = "localhost/busybox:1"
	pod.Spec.Containers[0].Command = []string{"sleep", "1000000"}
	return pod
}

// outsider creates the same pod without the label of the mesh.
func outsider(t *testing.T, namespace, name string) *corev1.Pod {
	t.Helper()
	pod := netPod(namespace, name, nodes(t)[0])
	delete(pod.Labels, meshv1alpha1.EnableProxyLabel)
	create(t, pod)
	return ready(t, namespace, name)
}

// nodes returns the names of the cluster's nodes.
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

// account is the directory of a pod's token and CA.
const account = "/var/run/secrets/kubernetes.io/serviceaccount/"

// apiserver returns the apiserver's address in a pod's environment.
func apiserver(t *testing.T) string {
	t.Helper()
	svc, err := cluster.Clientset.CoreV1().Services("default").Get(t.Context(), "kubernetes", metav1.GetOptions{})
	require.NoError(t, err)
	return net.JoinHostPort(svc.Spec.ClusterIP, "443")
}

// from returns the configuration of a client in the pod: it connects from inside the pod,
// with the pod's CA certificates and token.
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

// trusts returns a pod's CA certificates.
func trusts(t *testing.T, pod *corev1.Pod) *x509.CertPool {
	t.Helper()
	pool := x509.NewCertPool()
	require.True(t, pool.AppendCertsFromPEM([]byte(in(t, pod, "cat", account+"ca.crt"))))
	return pool
}
