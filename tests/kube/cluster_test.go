package kube

import (
	"bytes"
	"compress/gzip"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"

	"github.com/ctrlmesh/ctrlmesh/tests/audit"
)

func TestRootIsFoundAboveThePackage(t *testing.T) {
	root, err := findRoot()
	require.NoError(t, err)
	require.FileExists(t, filepath.Join(root, "tests", "kube", "cluster.go"))
}

func TestKubeconfigIsNeverChosenBetweenTwo(t *testing.T) {
	root := t.TempDir()
	own := filepath.Join(root, ".run", "kubeconfig")
	_, err := findKubeconfig(root, "")
	require.ErrorContains(t, err, "no cluster")
	got, err := findKubeconfig(root, "/else/where")
	require.NoError(t, err)
	require.Equal(t, "/else/where", got)

	require.NoError(t, os.Mkdir(filepath.Dir(own), 0o755))
	require.NoError(t, os.WriteFile(own, nil, 0o600))
	for _, given := range []string{"", own} {
		got, err = findKubeconfig(root, given)
		require.NoError(t, err)
		require.Equal(t, own, got)
	}
	_, err = findKubeconfig(root, "/else/where")
	require.ErrorContains(t, err, "two clusters", "a test must not choose a cluster itself")
}

func TestDecodeSkipsDocumentsOfComments(t *testing.T) {
	objects, err := decode([]byte(`# only a comment
---
apiVersion: v1
kind: Namespace
metadata: {name: a}
---
{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "b", "namespace": "a"}}
`))
	require.NoError(t, err)
	require.Len(t, objects, 2)
	require.Equal(t, "ConfigMap", objects[1].GetKind())

	_, err = decode([]byte("kind: Namespace\n"))
	require.ErrorContains(t, err, "no name")
	_, err = decode([]byte("a: [\n"))
	require.Error(t, err)
}

// The files are those of a run: a rotated, compressed log of an agent, and one request
// without an access line.
func TestTraffic(t *testing.T) { synctest.Test(t, testTraffic) } // Traffic waits before it reports a leak

func testTraffic(t *testing.T) {
	c := &Cluster{Root: t.TempDir()}
	write := func(content []byte, path ...string) {
		file := filepath.Join(append([]string{c.Root, ".run"}, path...)...)
		require.NoError(t, os.MkdirAll(filepath.Dir(file), 0o755))
		require.NoError(t, os.WriteFile(file, content, 0o644))
	}
	event := func(id string) string {
		return `{"auditID":"` + id + `","stage":"ResponseComplete","verb":"get","user":{"username":"system:serviceaccount:ns:sa"},"requestReceivedTimestamp":"2026-11-20T10:00:00.000000Z"}` + "\n"
	}
	line := func(id string) []byte {
		return []byte(`2026-11-20T10:00:00.1Z stderr F {"msg":"request","audit_id":"` + id + `"}` + "\n")
	}
	write([]byte(event("a")+event("b")+event("c")), "audit.log")
	write(line("a"), "node1", "pods", "ctrlmesh-system_ctrlmesh-agent-x_uid", "agent", "0.log")
	var gz bytes.Buffer
	w := gzip.NewWriter(&gz)
	_, err := w.Write(line("b"))
	require.NoError(t, err)
	require.NoError(t, w.Close())
	write(gz.Bytes(), "node2", "pods", "ctrlmesh-system_ctrlmesh-agent-y_uid", "agent", "0.log.20261120-100000.gz")
	write(line("c"), "node1", "pods", "ctrlmesh-system_ctrlmesh-manager-z_uid", "manager", "0.log")

	traffic, err := c.Traffic(t.Context(), audit.Callers{Users: []string{audit.ServiceAccount("ns", "sa")}})
	require.NoError(t, err)
	require.Len(t, traffic.Requests, 3)
	require.Equal(t, 2, traffic.Lines)
	require.Len(t, traffic.Leaked, 1)
	require.Equal(t, "c", traffic.Leaked[0].ID)
}
