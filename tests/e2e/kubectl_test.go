package e2e

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// kubectl inside of a member works as it does without the mesh.
func (m *members) testKubectl(t *testing.T) {
	// The two protocols by which kubectl upgrades a connection.
	protocols := map[string]string{
		"websocket": "export KUBECTL_REMOTE_COMMAND_WEBSOCKETS=true KUBECTL_PORT_FORWARD_WEBSOCKETS=true",
		"spdy":      "export KUBECTL_REMOTE_COMMAND_WEBSOCKETS=false KUBECTL_PORT_FORWARD_WEBSOCKETS=false",
	}
	t.Run("get", m.testKubectlGet)
	t.Run("apply", func(t *testing.T) {
		m.testKubectlApply(t, "applied", "")
		m.testKubectlApply(t, "applied-by-server", "--server-side")
	})
	for name, env := range protocols {
		t.Run("exec,"+name, func(t *testing.T) { m.testKubectlExec(t, env) })
		t.Run("cp,"+name, func(t *testing.T) { m.testKubectlCopy(t, env) })
		t.Run("port-forward,"+name, func(t *testing.T) { m.testKubectlPortForward(t, env) })
	}
	t.Run("logs", m.testKubectlLogs)
	t.Run("watch", m.testKubectlWatch)
}

// shellPrelude begins a script that runs in a directory of its own. `await COMMAND` repeats
// a command until it succeeds. Background processes end with the script.
const shellPrelude = `set -eu
dir=$(mktemp -d); cd "$dir"
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$dir"' EXIT
await() { n=0; until "$@"; do n=$((n+1)); [ $n -lt 1800 ] || { echo "waited in vain: $*" >&2; exit 1; }; sleep 0.1; done; }
`

// script runs in a shell of the first shard's member.
func (m *members) script(t *testing.T, lines ...string) string {
	t.Helper()
	return strings.TrimSpace(in(t, m.pods[0], "sh", "-c", shellPrelude+strings.Join(lines, "\n")))
}

func (m *members) testKubectlGet(t *testing.T) {
	for _, question := range []string{"-o name", "-o yaml", "--chunk-size=13 -o name", "-l color!=red -o json", "-l n>30 --no-headers -o custom-columns=NAME:.metadata.name"} {
		narrowed := question + " -l '" + m.selector(0) + "'"
		if own, rest, ok := strings.Cut(question, " -o "); ok && strings.HasPrefix(own, "-l ") {
			selector, flags, _ := strings.Cut(strings.TrimPrefix(own, "-l "), " ")
			question = fmt.Sprintf("-l '%s' %s -o %s", selector, flags, rest)
			narrowed = fmt.Sprintf("-l '%s,%s' %s -o %s", selector, m.selector(0), flags, rest)
		}
		want := in(t, m.direct, "sh", "-c", "kubectl get configmaps -A "+narrowed)
		assert.Equal(t, strings.TrimSpace(want), m.script(t, "kubectl get configmaps -A "+question), question)
	}
	assert.Empty(t, m.script(t, "kubectl get configmaps -o name -n "+m.foreign(0)[0]))
	assert.Equal(t, "configmap/cm-07", m.script(t, "kubectl get configmap cm-07 -o name -n "+m.foreign(0)[0]), "single objects of other shards may be read")
	assert.Contains(t, m.script(t, "kubectl label configmap cm-07 a=b -n "+m.foreign(0)[0]+" 2>&1 || true"), "another shard owns it")
	assert.Contains(t, m.script(t, "kubectl get pods -o wide"), "probe-1", "pods are not listed in a limit")
	assert.Contains(t, m.script(t, "kubectl describe configmap cm-07 -n "+m.owned[0][0]), "color=green")
}

func (m *members) testKubectlApply(t *testing.T, name, flag string) {
	ns := m.owned[0][0]
	apply := func(value string) string {
		return m.script(t, fmt.Sprintf(`kubectl apply %s -f - <<'END'
{apiVersion: v1, kind: ConfigMap, metadata: {name: %s, namespace: %s}, data: {key: %s}}
END`, flag, name, ns, value))
	}
	for _, value := range []string{"one", "two"} {
		apply(value)
		var cm corev1.ConfigMap
		require.NoError(t, cluster.Get(t.Context(), client.ObjectKey{Namespace: ns, Name: name}, &cm))
		assert.Equal(t, value, cm.Data["key"])
	}
	if flag == "" {
		assert.Contains(t, apply("two"), "unchanged", "what the mesh stamps is no change of the user's")
	}
	m.script(t, fmt.Sprintf("kubectl -n %s label configmap %s by=hand && kubectl -n %[1]s delete configmap %[2]s", ns, name))
}

func (m *members) testKubectlExec(t *testing.T, env string) {
	assert.Equal(t, "direct", m.script(t, env, "kubectl exec direct -- hostname"))
	assert.Equal(t, "through", m.script(t, env, "echo through | kubectl exec -i direct -- cat"))
	assert.Equal(t, "7", m.script(t, env, "kubectl exec direct -- sh -c 'exit 7' 2>/dev/null || echo $?"))
	assert.Equal(t, "out err", m.script(t, env, "kubectl exec direct -- sh -c 'echo out; echo err >&2' >o 2>e; echo $(cat o) $(cat e)"))
}

// testKubectlCopy copies more than fits into any buffer, in both directions.
func (m *members) testKubectlCopy(t *testing.T, env string) {
	m.script(t, env, `
dd if=/dev/urandom of=there bs=1M count=8 2>/dev/null
kubectl cp there direct:/tmp/copied
kubectl cp direct:/tmp/copied back
cmp there back
kubectl exec direct -- rm /tmp/copied`)
}

func (m *members) testKubectlPortForward(t *testing.T, env string) {
	assert.Equal(t, strings.Repeat("this is direct\n", 2)+"this is direct", m.script(t, env, `
kubectl port-forward pod/direct 18080:8080 >log 2>&1 &
await grep -q Forwarding log
for i in 1 2 3; do wget -q -O - http://127.0.0.1:18080/; done`))
}

func (m *members) testKubectlLogs(t *testing.T) {
	m.script(t, fmt.Sprintf(`
kubectl logs -f direct >log &
fetch() { kubectl get --raw /api/v1/namespaces/%s/pods/direct:8080/proxy/$1 >/dev/null; }
fetch before
await grep -q /before log
fetch after # while it is followed
await grep -q /after log`, m.home))
}

func (m *members) testKubectlWatch(t *testing.T) {
	own, foreign := m.owned[0][0], m.foreign(0)[0]
	out := m.script(t, fmt.Sprintf(`
kubectl get configmaps -A -w -o name >seen &
await grep -q cm-07 seen
kubectl exec direct -- kubectl -n %s create configmap by-kubectl >/dev/null
kubectl -n %s create configmap by-kubectl >/dev/null
await grep -q by-kubectl seen
cat seen`, foreign, own))
	assert.Equal(t, 1, strings.Count(out, "by-kubectl"))
}
