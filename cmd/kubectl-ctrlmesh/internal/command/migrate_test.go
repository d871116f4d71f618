package command

import (
	"errors"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	kridge "github.com/ctrlmesh/ctrlmesh/api/kridge/v1alpha1"
	kruise "github.com/ctrlmesh/ctrlmesh/api/kruise/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/meshtest"
)

// ofAncestors returns a file with objects of the mesh's ancestors.
func ofAncestors(name string) string {
	return filepath.Join("..", "..", "..", "..", "manager", "dialect", "testdata", name+".in.yaml")
}

func TestMigrateFiles(t *testing.T) {
	c := meshtest.Healthy(t)
	c.Unreachable = errors.New("no cluster is needed")
	r := run(t, c, "", "migrate", "-f", ofAncestors("controllermesh-virtualapp")+","+ofAncestors("kridge-root"), "-n", "team")
	require.Equal(t, Healthy, r.code, "%s", r)
	require.Equal(t, 2, strings.Count(r.out, "---\n"))
	require.Contains(t, r.out, "kind: ShardingConfig\nmetadata:\n  name: test-operator\n  namespace: team\n")
	require.NotContains(t, r.out, "status:")
	require.NotContains(t, r.out, "creationTimestamp")
	require.Contains(t, r.err, "? VirtualApp team/test-operator: its pods were on the mesh because of its selector: add the label")

	linted := run(t, c, r.out, "lint", "-f", "-")
	require.Equal(t, Healthy, linted.code, "admission accepts what is printed: %s", linted)

	r = run(t, c, "", "migrate", "-f", ofAncestors("trafficpolicy"), "-o", "json")
	require.Equal(t, Healthy, r.code, "%s", r)
	linted = run(t, c, r.out, "lint", "-f", "-")
	require.Equal(t, Healthy, linted.code, "%s", linted)
}

func TestMigrateObjectsOfTheCluster(t *testing.T) {
	c := meshtest.Healthy(t)
	one := &metav1.LabelSelector{MatchLabels: map[string]string{"app": "one"}}
	c.Add(
		&kruise.VirtualApp{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "app"}, Spec: kruise.VirtualAppSpec{Selector: one}},
		&kruise.VirtualApp{ObjectMeta: metav1.ObjectMeta{Namespace: meshtest.Operator, Name: "unselected"}},
		&kridge.ShardingConfig{ObjectMeta: metav1.ObjectMeta{Namespace: meshtest.Operator, Name: "derived", Labels: map[string]string{kridge.RootLabel: "a"}}},
	)
	r := run(t, c, "", "migrate", "-n", "team")
	require.Equal(t, Healthy, r.code, "%s", r)
	require.Contains(t, r.out, "name: app\n")

	r = run(t, c, "", "migrate", "-A")
	require.Equal(t, Found, r.code, "%s", r)
	require.Contains(t, r.out, "name: app\n", "the others are printed")
	require.Contains(t, r.err, "! VirtualApp operator-demo/unselected: spec.selector: Required value")
	require.Contains(t, r.err, "? ShardingConfig of Kridge operator-demo/derived: left out")
}

func TestMigrateRefuses(t *testing.T) {
	c := meshtest.Healthy(t)
	for in, want := range map[string]string{
		"": "there are no objects of openkruise/controllermesh or Kridge",
		"apiVersion: ctrlmesh.kruise.io/v1alpha1\nkind: VirtualApp\nmetadata: {name: a}\nspec: {selectr: {}}": `unknown field "spec.selectr"`,
		"a: [": "document 1: ",
	} {
		r := run(t, c, in, "migrate", "-f", "-")
		require.Equal(t, Unknown, r.code, "%s", r)
		require.Contains(t, r.err, want)
		require.Empty(t, r.out)
	}
	r := run(t, c, "", "migrate")
	require.Contains(t, r.err, "there are no objects of openkruise/controllermesh or Kridge: name a namespace by -n")
}
