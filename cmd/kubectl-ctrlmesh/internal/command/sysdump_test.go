package command

import (
	"archive/zip"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/meshtest"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/snapshot"
)

// dumped runs the command sysdump, and returns the files of the archive by name.
func dumped(t *testing.T, c *meshtest.Cluster, log string, args ...string) (result, map[string]string) {
	t.Helper()
	t.Chdir(t.TempDir())
	r := runWithLogs(t, c, func(_ context.Context, _, pod string, o *corev1.PodLogOptions) (io.ReadCloser, error) {
		if log == "" {
			return nil, errors.New("forbidden")
		}
		before := ""
		if o.Previous {
			before = "before it restarted: "
		}
		return io.NopCloser(strings.NewReader(before + pod + " " + log)), nil
	}, append([]string{"sysdump"}, args...)...)
	files := map[string]string{}
	found, err := filepath.Glob("*.zip")
	require.NoError(t, err)
	for _, name := range found {
		archive, err := zip.OpenReader(name)
		require.NoError(t, err, "%s", r)
		defer archive.Close()
		for _, f := range archive.File {
			in, err := f.Open()
			require.NoError(t, err)
			text, err := io.ReadAll(in)
			require.NoError(t, err)
			require.NotContains(t, files, f.Name)
			files[f.Name] = string(text)
		}
	}
	for name, text := range files {
		require.NotContains(t, text, meshtest.SecretText, name)
	}
	return r, files
}

func TestSysdump(t *testing.T) {
	c := meshtest.Healthy(t)
	plantSecrets(t, c)
	agent := meshtest.Find[*corev1.Pod](t, c, snapshot.DefaultNamespace, snapshot.Agent+"-1")
	agent.Spec.Containers[0].Args = []string{"--log-level=debug"}
	agent.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "agent", RestartCount: 1}}
	r, files := dumped(t, c, "it serves\nAuthorization: Bearer "+meshtest.SecretText+"\nlast")
	require.Equal(t, Healthy, r.code, "%s", r)
	require.Contains(t, r.out, "ctrlmesh-sysdump-20260102T030405Z.zip: ")
	require.Contains(t, files["status.txt"], "operator-demo")
	require.Contains(t, files["check.json"], "{")
	require.Contains(t, files["configuration/shardingconfig.ctrlmesh.kusionstack.io.yaml"], "targetStatefulSet: operator-demo")
	require.Contains(t, files["mesh/pod.yaml"], "--log-level=debug")
	require.Equal(t, 1, strings.Count(files["members/pod.yaml"], "--leader-elect="+"REDACTED"))
	require.Contains(t, files["members/pod.yaml"], "name: PASSWORD\n")
	require.Contains(t, files["operators/operator-demo/statefulset.yaml"], "- --token\n")
	require.Contains(t, files["cluster/customresourcedefinition.yaml"], "shardingconfigs.ctrlmesh.kusionstack.io")
	require.NotContains(t, files["cluster/customresourcedefinition.yaml"], "openAPIV3Schema")
	require.Equal(t, "ctrlmesh-manager-2 it serves\nAuthorization: REDACTED\nlast", files["logs/ctrlmesh-manager-2/manager.log"])
	require.Contains(t, files["logs/ctrlmesh-agent-1/agent.previous.log"], "before it restarted: ")
	require.NotContains(t, files, "logs/ctrlmesh-agent-2/agent.previous.log")
	require.NotContains(t, files, "incomplete.txt")
}

// plantSecrets puts secrets where users may have some.
func plantSecrets(t *testing.T, c *meshtest.Cluster) {
	pod := meshtest.Find[*corev1.Pod](t, c, meshtest.Operator, "od-0")
	pod.Annotations["kubectl.kubernetes.io/last-applied-configuration"] = meshtest.SecretText
	pod.Annotations["vault.example.com/token"] = meshtest.SecretText
	container := corev1.Container{
		Name: "manager", Env: []corev1.EnvVar{{Name: "PASSWORD", Value: meshtest.SecretText}},
		Command: []string{"/manager", "--leader-elect=" + meshtest.SecretText}, Args: []string{"--token", meshtest.SecretText},
		LivenessProbe: &corev1.Probe{ProbeHandler: corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{HTTPHeaders: []corev1.HTTPHeader{{Name: "Authorization", Value: meshtest.SecretText}}}}},
		Lifecycle:     &corev1.Lifecycle{PreStop: &corev1.LifecycleHandler{Exec: &corev1.ExecAction{Command: []string{"sh", "-c", "curl -H " + meshtest.SecretText}}}},
	}
	pod.Spec.Containers = []corev1.Container{container}
	c.Add(
		&appsv1.StatefulSet{ObjectMeta: metav1.ObjectMeta{Namespace: meshtest.Operator, Name: meshtest.Operator}, Spec: appsv1.StatefulSetSpec{
			Template: corev1.PodTemplateSpec{Spec: corev1.PodSpec{Containers: []corev1.Container{container}}},
		}},
		&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: snapshot.DefaultNamespace, Name: "ctrlmesh-platform"}, Data: map[string]string{
			"platform.yaml": "prometheus: https://user:" + meshtest.SecretText + "@prometheus.example.com",
			"key":           "-----BEGIN EC PRIVATE KEY-----\n" + meshtest.SecretText + "\n-----END EC PRIVATE KEY-----",
		}},
		&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: snapshot.DefaultNamespace, Name: "of-others"}, Data: map[string]string{"password": meshtest.SecretText}},
	)
}

func TestSysdumpSaysWhatItLacks(t *testing.T) {
	c := meshtest.Healthy(t)
	c.Forbidden = func(list client.ObjectList) error {
		if list.GetObjectKind().GroupVersionKind().Kind == "NodeList" {
			return errors.New("you may not list nodes")
		}
		return nil
	}
	r, files := dumped(t, c, "", "--file=mesh.zip", "-o", "json")
	require.Equal(t, Unknown, r.code, "%s", r)
	require.Contains(t, r.out, `"file": "mesh.zip"`)
	require.Contains(t, r.err, "5 parts could not be read, see incomplete.txt")
	require.Contains(t, files["incomplete.txt"], "cluster/node: you may not list nodes\n")
	require.Contains(t, files["incomplete.txt"], "logs/ctrlmesh-agent-1/agent.log: forbidden\n")
	require.Contains(t, files, "mesh/pod.yaml")
}

func TestSysdumpRefuses(t *testing.T) {
	c := meshtest.Healthy(t)
	r, _ := dumped(t, c, "a", "--since=0s")
	require.Equal(t, Unknown, r.code)
	require.Contains(t, r.err, "invalid --since")
	r, _ = dumped(t, c, "a", "--file=none/mesh.zip")
	require.Equal(t, Unknown, r.code)
	require.Contains(t, r.err, "name another by --file")

	exists := filepath.Join(t.TempDir(), "mesh.zip")
	require.NoError(t, os.WriteFile(exists, []byte("mine"), 0o600))
	r, _ = dumped(t, c, "a", "--file="+exists)
	require.Equal(t, Unknown, r.code)
	require.Contains(t, r.err, "mesh.zip exists")
	text, err := os.ReadFile(exists)
	require.NoError(t, err)
	require.Equal(t, "mine", string(text))

	c.Unreachable = errors.New("connection refused")
	r, files := dumped(t, c, "a")
	require.Equal(t, Unknown, r.code)
	require.Contains(t, r.err, "connection refused")
	require.Empty(t, files, "it leaves nothing behind")
}
