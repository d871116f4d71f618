package lifecycle

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	kruise "github.com/ctrlmesh/ctrlmesh/api/kruise/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

const patience = 3 * time.Minute

var rollback = regexp.MustCompile(`run helm -n ` + kube.SystemNamespace + ` (rollback ctrlmesh \d+)`)

// release is a release of the chart on the cluster.
type release struct {
	*kube.Cluster
	program string
}

func connect(t *testing.T) *release {
	t.Helper()
	if os.Getenv("CTRLMESH_CHART_E2E") == "" {
		t.Skip("needs a cluster without the mesh: make chart-e2e")
	}
	c, err := kube.Connect(kruise.AddToScheme)
	require.NoError(t, err)
	cmd := exec.Command(filepath.Join(c.Root, "hack", "helm.sh"))
	cmd.Stderr = os.Stderr
	dir, err := cmd.Output()
	require.NoError(t, err)
	return &release{c, filepath.Join(strings.TrimSpace(string(dir)), "helm")}
}

// helm returns all that helm printed.
func (r *release) helm(t *testing.T, args ...string) (string, error) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), r.program, append([]string{"--namespace", kube.SystemNamespace}, args...)...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+r.Kubeconfig)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

func (r *release) mustHelm(t *testing.T, args ...string) {
	t.Helper()
	out, err := r.helm(t, args...)
	require.NoError(t, err, out)
}

func (r *release) upgrade(t *testing.T, values string) {
	t.Helper()
	r.mustHelm(t, "upgrade", "ctrlmesh", r.chart(), "--reuse-values", "--set", values, "--wait", "--timeout", "5m")
	r.waitRolledOut(t)
}

func (r *release) chart() string { return filepath.Join(r.Root, "deploy", "chart") }

func (r *release) waitRolledOut(t *testing.T) {
	t.Helper()
	require.NoError(t, kube.UntilWithin(t.Context(), patience, "the mesh", r.MeshReady))
}

// refused requires that uninstall fails, says why, and deletes nothing. It returns what helm printed.
func (r *release) refused(t *testing.T, why string) string {
	t.Helper()
	out, err := r.helm(t, "uninstall", "ctrlmesh", "--timeout", "3m")
	require.Error(t, err, out)
	require.Contains(t, out, why)
	require.NoError(t, r.Get(t.Context(), client.ObjectKeyFromObject(kube.Agents()), kube.Agents()))
	require.NoError(t, r.Get(t.Context(), client.ObjectKeyFromObject(kube.Manager()), kube.Manager()))
	return out
}

// rollBack runs the command that a refusal names.
func (r *release) rollBack(t *testing.T, refusal string) {
	t.Helper()
	found := rollback.FindStringSubmatch(refusal)
	require.NotNil(t, found, refusal)
	r.mustHelm(t, strings.Fields(found[1])...)
}

func TestHelmInstallsUpgradesAndRemovesMesh(t *testing.T) {
	r := connect(t)
	require.True(t, apierrors.IsNotFound(r.Get(t.Context(), client.ObjectKeyFromObject(kube.Agents()), kube.Agents())),
		"the mesh is installed: make uninstall")
	r.createNamespace(t)
	r.mustHelm(t, "install", "ctrlmesh", r.chart(), "--wait", "--timeout", "5m")
	r.waitRolledOut(t)
	m := r.createMember(t)
	app := m.createVirtualApp(t)

	for _, step := range []struct {
		name string
		run  func()
	}{
		{"upgrade", func() { r.upgrade(t, "agent.accessLog=true,manager.goMemLimit=400MiB") }},
		{"rollback", func() {
			r.mustHelm(t, "rollback", "ctrlmesh", "1", "--wait", "--timeout", "5m")
			r.waitRolledOut(t)
		}},
	} {
		mark, err := r.Mark()
		require.NoError(t, err)
		before := m.agents(t)
		step.run()
		require.NotEqual(t, before, m.agents(t), "the %s replaced no agent", step.name)
		m.waitServed(t, time.Now())
		m.requireUndisturbed(t, step.name, mark)
		require.NoError(t, m.selected(t.Context()), "after the %s", step.name)
	}

	r.refused(t, "virtualapps exist")
	require.NoError(t, r.Delete(t.Context(), app))
	r.waitGone(t, app)
	r.refused(t, "labelled pods exist")
	breaker := m.createBreaker(t)
	require.NoError(t, r.Delete(t.Context(), m.pod, client.GracePeriodSeconds(0)))
	r.waitGone(t, m.pod)
	r.refused(t, "circuitbreakers exist")
	require.NoError(t, r.Delete(t.Context(), breaker))
	r.waitGone(t, breaker)
	refusal := r.refused(t, "agents that redirect exist")

	r.rollBack(t, refusal)
	r.upgrade(t, "agent.cleanup=true")
	r.mustHelm(t, "uninstall", "ctrlmesh", "--wait", "--timeout", "5m")
	r.requireRemoved(t)
}

func (r *release) createNamespace(t *testing.T) {
	t.Helper()
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: kube.SystemNamespace,
		Labels: map[string]string{"pod-security.kubernetes.io/enforce": "privileged"}}}
	require.NoError(t, kube.UntilWithin(t.Context(), patience, "the namespace", func(ctx context.Context) error {
		return r.Create(ctx, ns.DeepCopy()) // an earlier one may still be being deleted
	}))
	t.Cleanup(func() { _ = r.Delete(context.WithoutCancel(t.Context()), ns) })
}

func (r *release) waitGone(t *testing.T, obj client.Object) {
	t.Helper()
	require.NoError(t, kube.UntilWithin(t.Context(), patience, obj.GetName()+" to be deleted", func(ctx context.Context) error {
		err := r.Get(ctx, client.ObjectKeyFromObject(obj), obj)
		if err == nil {
			return fmt.Errorf("%s still exists", obj.GetName())
		}
		return client.IgnoreNotFound(err)
	}))
}

// requireRemoved requires that nothing is left of the mesh but what the chart keeps.
func (r *release) requireRemoved(t *testing.T) {
	t.Helper()
	require.NoError(t, kube.UntilWithin(t.Context(), patience, "the pods to be deleted", func(ctx context.Context) error {
		left, err := r.Kubectl(ctx, "get", "-A", "-o", "name", "-l", "app.kubernetes.io/part-of=ctrlmesh", "--ignore-not-found",
			"deployments,daemonsets,jobs,pods,services,clusterroles,clusterrolebindings,networkpolicies")
		if err == nil && strings.TrimSpace(left) != "" {
			err = fmt.Errorf("these are left: %s", left)
		}
		return err
	}))
	var crd apiextensionsv1.CustomResourceDefinition
	require.NoError(t, r.Get(t.Context(), client.ObjectKey{Name: "shardingconfigs." + meshv1alpha1.GroupName}, &crd), "crds.keep")
	var nodes corev1.NodeList
	require.NoError(t, r.List(t.Context(), &nodes))
	for _, node := range nodes.Items {
		pins, err := r.NodeExec(t.Context(), node.Name, "find", "/sys/fs/bpf", "-path", "*ctrlmesh*")
		require.NoError(t, err)
		assert.Empty(t, strings.TrimSpace(pins), node.Name)
	}
}
