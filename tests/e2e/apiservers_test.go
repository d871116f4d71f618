package e2e

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/tests/audit"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

// A second apiserver starts and stops while members run. They are sharded on both
// apiservers, through the Service and at the apiserver's own address.
func TestMembersAreShardedOnBothApiservers(t *testing.T) {
	if _, err := os.Stat(filepath.Join(cluster.Root, ".run", "kubeconfig")); err != nil {
		t.Skip("only the cluster of tests/cluster can be given a second apiserver, and there is another")
	}
	byName := map[string]string{"a": meshv1alpha1.CaptureEBPF, "b": meshv1alpha1.CaptureIPTables}
	p := newPair(t, withClients, func(pod *corev1.Pod) { capturedBy(byName[pod.Name])(pod) })
	start := time.Now()
	asking := []*replies{p.a.asking(t), p.b.asking(t)}
	first := endpoints(t, 1)

	end := secondApiserver(t)
	second := endpoints(t, 2)
	require.Subset(t, second, first)
	for _, m := range []*member{p.a, p.b} {
		for _, at := range second {
			until(t, m.Name+" to work at "+at, func(ctx context.Context) error {
				out, _, err := cluster.Exec(ctx, m.Namespace, m.Name, "", "sh", "-c", clientPrelude+`curl $curl --connect-to "::`+at+`" https://kubernetes.default.svc$list`)
				if err != nil {
					return err
				}
				return m.check(parseReply("0 " + out))
			})
		}
	}
	joined := time.Now()
	for _, as := range asking {
		as.await(t, "a reply", joined, isGood)
	}

	end()
	require.Equal(t, first, endpoints(t, 1))
	left := time.Now()
	for _, as := range asking {
		as.await(t, "a reply after the second apiserver's end", left, isGood)
		good, refused := as.neverUnsharded(t)
		t.Logf("%s: %d replies, %d refusals", as.member.Name, good, refused)
	}
	traffic, err := cluster.Traffic(t.Context(), audit.Callers{Pods: []string{p.namespace + "/a", p.namespace + "/b"}, Since: start})
	require.NoError(t, err)
	require.Empty(t, traffic.Leaked, never)
}

// secondApiserver starts a second apiserver and returns a function that stops it.
func secondApiserver(t *testing.T) (end func()) {
	t.Helper()
	run := func(ctx context.Context, do string) error {
		out, err := exec.CommandContext(ctx, filepath.Join(cluster.Root, "tests", "cluster", "node.sh"), do, "kube-apiserver2").CombinedOutput()
		if err != nil {
			err = fmt.Errorf("%w: %s", err, out)
		}
		return err
	}
	end = once(t, func(ctx context.Context) error { return run(ctx, "shutdown") })
	require.NoError(t, run(t.Context(), "start"))
	return end
}

// endpoints waits until there are n apiservers, and returns their addresses.
func endpoints(t *testing.T, count int) []string {
	t.Helper()
	var out []string
	until(t, fmt.Sprintf("%d apiservers", count), func(ctx context.Context) error {
		slice := &discoveryv1.EndpointSlice{}
		if err := cluster.Get(ctx, client.ObjectKey{Namespace: "default", Name: "kubernetes"}, slice); err != nil {
			return err
		}
		out = nil
		for _, e := range slice.Endpoints {
			out = append(out, net.JoinHostPort(e.Addresses[0], fmt.Sprint(*slice.Ports[0].Port)))
		}
		if len(out) != count {
			return fmt.Errorf("there are %v", out)
		}
		return nil
	})
	return out
}

// Members are sharded at an additional address that the platform settings name. Before, the
// connection passes by the mesh, whose CA alone the client trusts.
func TestMembersAreShardedAtAdditionalAddresses(t *testing.T) {
	home := namespace(t, "elsewhere")
	first := netip.MustParseAddrPort(endpoints(t, 1)[0])
	port := int32(first.Port())
	create(t, &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: home, Name: "balancer"},
		Spec:       corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 8443, TargetPort: intstr.FromInt32(port)}}},
	}, &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: home, Name: "balancer", Labels: map[string]string{discoveryv1.LabelServiceName: "balancer"}},
		AddressType: discoveryv1.AddressTypeIPv4, Ports: []discoveryv1.EndpointPort{{Port: &port}},
		Endpoints: []discoveryv1.Endpoint{{Addresses: []string{first.Addr().String()}}},
	})
	name := "balancer." + home + ".svc.cluster.local:8443"
	ask := clientPrelude + `curl $curl --connect-to ::` + name + ` https://kubernetes.default.svc$list`
	byName := map[string]string{"a": meshv1alpha1.CaptureEBPF, "b": meshv1alpha1.CaptureIPTables}
	p := newPair(t, withClients, func(pod *corev1.Pod) { capturedBy(byName[pod.Name])(pod) })
	start := time.Now()
	for _, m := range []*member{p.a, p.b} {
		_, stderr, err := cluster.Exec(t.Context(), m.Namespace, m.Name, "", "sh", "-c", ask)
		require.Error(t, err)
		require.Contains(t, stderr, "certificate")
	}

	settings := &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Namespace: kube.SystemNamespace, Name: "ctrlmesh-platform"},
		Data:       map[string]string{"platform.yaml": "apiserver: {addresses: ['" + name + "']}"},
	}
	create(t, settings)
	once(t, func(ctx context.Context) error { return cluster.Delete(ctx, settings) })
	for _, m := range []*member{p.a, p.b} {
		until(t, m.Name+" to work at "+name, func(ctx context.Context) error {
			out, _, err := cluster.Exec(ctx, m.Namespace, m.Name, "", "sh", "-c", ask)
			if err != nil {
				return err
			}
			return m.check(parseReply("0 " + out))
		})
	}
	traffic, err := cluster.Traffic(t.Context(), audit.Callers{Pods: []string{p.namespace + "/a", p.namespace + "/b"}, Since: start})
	require.NoError(t, err)
	require.Empty(t, traffic.Leaked, never)
}
