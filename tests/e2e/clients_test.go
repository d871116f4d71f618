package e2e

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/tests/audit"
)

// clients are clients that users have. Each lists the ConfigMaps of all namespaces.
var clients = []struct {
	name, script string
	byName       bool // connects to the Service's name, not to the configured address
}{
	{name: "curl", script: `curl $curl $api$list`},
	{name: "curl, HTTP/1.1", script: `curl $curl --http1.1 $api$list`},
	{name: "curl by name", byName: true, script: `curl $curl https://kubernetes.default.svc$list`},
	{name: "curl, TCP fast open", script: `curl $curl --tcp-fastopen $api$list`},
	{name: "curl, from the pod's address", script: `curl $curl --interface $POD_IP $api$list`},
	{name: "kubectl", script: `kubectl get configmaps -A -o json`},
	// The runtime uses MPTCP if configured to; its sockets show that it does.
	{name: "kubectl, Multipath TCP", script: `export GODEBUG=multipathtcp=3
kubectl get configmaps -A -w -o name >seen &
await grep -q configmap/ seen
await awk '$1 ~ /^MPTCP/ {n += $3} END {exit n == 0}' /proc/net/protocols
kubectl get configmaps -A -o json`},
	{name: "OpenSSL", script: `printf 'GET %s HTTP/1.0\r\nHost: kubernetes\r\n%s\r\n\r\n' $list "$auth" |
	openssl s_client -quiet -connect $host:$KUBERNETES_SERVICE_PORT -CAfile $sa/ca.crt -verify_return_error -verify_ip $KUBERNETES_SERVICE_HOST`},
	{name: "OpenSSL by name", byName: true, script: `printf 'GET %s HTTP/1.0\r\nHost: kubernetes\r\n%s\r\n\r\n' $list "$auth" |
	openssl s_client -quiet -connect kubernetes.default.svc:443 -servername kubernetes.default.svc -CAfile $sa/ca.crt -verify_return_error -verify_hostname kubernetes.default.svc`},
	{name: "Node's fetch", script: `NODE_EXTRA_CA_CERTS=$sa/ca.crt node -e '
const [url, authorization] = process.argv.slice(1)
fetch(url, {headers: {authorization: authorization.split(": ")[1]}}).then(async r => {
	console.log(await r.text())
	process.exitCode = r.ok ? 0 : 22
})' $api$list "$auth"`},
}

// Pods in user namespaces of their own are captured and sharded like others.
func TestPodsInUserNamespacesAreSharded(t *testing.T) {
	t.Parallel()
	for _, way := range captureModes {
		t.Run(way, func(t *testing.T) {
			t.Parallel()
			p := newPair(t, capturedBy(way), func(pod *corev1.Pod) { pod.Spec.HostUsers = new(bool) })
			require.Equal(t, way, p.capture(t))
			require.NotContains(t, in(t, p.a.Pod, "cat", "/proc/self/uid_map"), "4294967295")
		})
	}
}

// clientPrelude prepares what a client needs, in a directory of its own.
const clientPrelude = shellPrelude + `
sa=` + account + ` list=/api/v1/configmaps
host=$KUBERNETES_SERVICE_HOST; case $host in *:*) host="[$host]"; esac
api=https://$host:$KUBERNETES_SERVICE_PORT
auth="Authorization: Bearer $(cat $sa/token)"
curl="--silent --show-error --fail-with-body --cacert $sa/ca.crt --header @auth"
echo "$auth" >auth
`

// ownPorts has the pod itself listen on ports: 15000 to 16000, which service meshes often
// use, at any address, and one on each loopback address alone. Each sends its port.
const ownPorts = `const net = require("net")
const listen = (port, at) => new Promise((ok, no) => net.createServer(c => c.end("own " + port)).once("error", no).listen(port, at, ok))
const all = []
for (let port = 15000; port <= 16000; port++) all.push(listen(port, "::"))
all.push(listen(8001, "127.0.0.1"), listen(8002, "::1"))
Promise.all(all).then(() => require("fs").writeFileSync("/tmp/listening", ""))`

// Common clients are sharded in every capture mode, and the apiserver sees the pod's own
// address: a NetworkPolicy that works without the mesh works with it. The pod can use all
// of its ports.
func TestCommonClientsAreSharded(t *testing.T) {
	t.Parallel()
	for _, way := range captureModes {
		t.Run(way, func(t *testing.T) {
			start := time.Now()
			p := newPair(t, capturedBy(way), withClients)
			require.Equal(t, way, p.capture(t))
			pod := p.a.Pod
			for _, c := range clients {
				if c.byName && way == meshv1alpha1.CaptureAddress {
					continue // a client captured by address has to use that address
				}
				t.Run(c.name, func(t *testing.T) {
					out := in(t, pod, "sh", "-c", clientPrelude+c.script)
					require.NoError(t, p.a.check(parseReply("0 "+out)), out)
				})
			}
			t.Run("own ports", func(t *testing.T) {
				for _, address := range []string{"127.0.0.1 8001", "::1 8002", "127.0.0.1 15001", "::1 15006", "127.0.0.1 15443", pod.Status.PodIP + " 16000"} {
					require.Contains(t, in(t, pod, "sh", "-c", "nc "+address+" </dev/null"), "own "+strings.Fields(address)[1])
				}
			})
			requireOwnAddress(t, pod, start)
		})
	}
}

// withClients gives a pod the probe's image, with all clients, and has it listen on ports of
// its own from its start.
func withClients(pod *corev1.Pod) {
	c := &pod.Spec.Containers[0]
	c.Image = probeImage
	c.Command = []string{"node", "-e", ownPorts}
	c.Env = []corev1.EnvVar{{Name: "POD_IP", ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: "status.podIP"}}}}
	c.ReadinessProbe = &corev1.Probe{PeriodSeconds: 1, ProbeHandler: corev1.ProbeHandler{
		Exec: &corev1.ExecAction{Command: []string{"test", "-e", "/tmp/listening"}}}}
}

// requireOwnAddress requires that all requests of a pod reached the apiserver from the pod's
// address, through the mesh.
func requireOwnAddress(t *testing.T, pod *corev1.Pod, since time.Time) {
	t.Helper()
	traffic, err := cluster.Traffic(t.Context(), audit.Callers{Pods: []string{pod.Namespace + "/" + pod.Name}, Since: since})
	require.NoError(t, err)
	require.NotEmpty(t, traffic.Requests)
	require.Empty(t, traffic.Leaked, never)
	for _, r := range traffic.Requests {
		require.Equal(t, []string{pod.Status.PodIP}, r.From, r)
	}
}
