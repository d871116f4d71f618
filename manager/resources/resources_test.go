package resources

import (
	"errors"
	"log/slog"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/discovery"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

var lists = []*metav1.APIResourceList{
	{GroupVersion: "v1", APIResources: []metav1.APIResource{
		{Name: "configmaps", SingularName: "configmap", Kind: "ConfigMap", ShortNames: []string{"cm"}},
		{Name: "pods", SingularName: "pod", Kind: "Pod", ShortNames: []string{"po"}},
		{Name: "pods/log", Kind: "Pod"},
	}},
	{GroupVersion: "example.com/v1", APIResources: []metav1.APIResource{{Name: "tallies", SingularName: "tally", Kind: "Tally"}}},
}

func groups(group, resource string) []v1alpha1.ResourceGroup {
	return []v1alpha1.ResourceGroup{{APIGroups: []string{group}, Resources: []string{resource}}}
}

// catalog returns one whose apiserver serves the lists, and fails in a way that can change.
func catalog(t *testing.T, fails *error) (c *Catalog, changes *int) {
	t.Helper()
	changes = new(int)
	return &Catalog{
		Discover: func() ([]*metav1.APIGroup, []*metav1.APIResourceList, error) { return nil, lists, *fails },
		Changed:  func() { *changes++ },
		Log:      slog.New(slog.NewTextHandler(t.Output(), nil)),
	}, changes
}

func TestUnknown(t *testing.T) {
	c, _ := catalog(t, new(error))
	require.NoError(t, c.look(0))
	for _, tt := range []struct{ group, resource, want string }{
		{"", "configmaps", ""},
		{"*", "tallies", ""},
		{"example.com", "*", ""},
		{"*", "*", ""},
		{"", "pods/status", ""},
		{"example.com", "tally", `tally.example.com: the apiserver serves no such resource; did you mean tallies?`},
		{"example.com", "Tally", `Tally.example.com: the apiserver serves no such resource; did you mean tallies?`},
		{"", "configmap", `configmap: the apiserver serves no such resource; did you mean configmaps?`},
		{"", "cm", `cm: the apiserver serves no such resource; did you mean configmaps?`},
		{"", "confgimaps", `confgimaps: the apiserver serves no such resource; did you mean configmaps?`},
		{"apps", "configmaps", `configmaps.apps: the apiserver serves no such resource; did you mean configmaps of group ""?`},
		{"*", "nonsense", `nonsense.*: the apiserver serves no such resource`},
		{"exmple.com", "*", `group "exmple.com": the apiserver serves no such group; did you mean "example.com"?`},
	} {
		assert.Equal(t, Unknown{Message: tt.want}, c.Unknown(groups(tt.group, tt.resource)))
	}
}

func TestFailingGroupsAreUndetermined(t *testing.T) {
	var fails error = &discovery.ErrGroupDiscoveryFailed{Groups: map[schema.GroupVersion]error{{Group: "metrics.k8s.io", Version: "v1"}: errors.New("unavailable")}}
	c, _ := catalog(t, &fails)
	require.NoError(t, c.look(0))
	u := c.Unknown(groups("metrics.k8s.io", "pods"))
	assert.Contains(t, u.Message, "cannot list")
	assert.True(t, u.Undetermined)
	assert.True(t, c.Unknown(groups("*", "nonsense")).Undetermined)
	assert.False(t, c.Unknown(groups("", "nonsense")).Undetermined)
}

// A definition that was created a moment ago is found by the next question, not by the next look.
func TestUnknownNowAsksTheApiserver(t *testing.T) {
	fails := errors.New("unreachable")
	c, changes := catalog(t, &fails)
	u := c.UnknownNow(groups("", "pods"))
	require.NotEmpty(t, u.Message)
	require.True(t, u.Undetermined)
	fails = nil
	require.Zero(t, c.UnknownNow(groups("", "pods")))
	require.Equal(t, 1, *changes)
	require.NoError(t, c.look(0))
	require.Equal(t, 1, *changes, "nothing has changed")
}
