package dialect

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	kruise "github.com/ctrlmesh/ctrlmesh/api/kruise/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
)

func randomLabels(random *rand.Rand, least int) map[string]string {
	out := map[string]string{}
	for len(out) < least || random.IntN(2) == 0 && len(out) < 4 {
		out[fmt.Sprintf("k%d", random.IntN(4))] = fmt.Sprintf("v%d", random.IntN(3))
	}
	return out
}

// A pod matches one selector of its subset, and none of the others. Its subset is the one that
// the manager places it into.
func TestSelectorsMatchThePodsOfTheirSubset(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 4))
	for range 300 {
		app := &kruise.VirtualApp{ObjectMeta: metav1.ObjectMeta{Name: "op"}}
		app.Spec.Selector = selector("app", "op")
		if random.IntN(3) == 0 {
			app.Spec.Selector.MatchLabels["k0"] = "v0"
		}
		root := &v1alpha1.RootConfig{Prefix: "op", TargetSelector: app.Spec.Selector}
		for i := range 1 + random.IntN(3) {
			name := fmt.Sprintf("s%d", i)
			app.Spec.Subsets = append(app.Spec.Subsets, kruise.VirtualAppSubset{Name: name, Labels: randomLabels(random, 1)})
			root.Subsets = append(root.Subsets, v1alpha1.Subset{Name: name, PodLabels: app.Spec.Subsets[i].Labels})
		}
		for range 50 {
			pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p", UID: "p", Labels: randomLabels(random, 0)}}
			pod.Labels["app"] = "op"
			want := ""
			if layout.Selects(root)(pod) {
				placed, _ := layout.Place(root, 0, []*corev1.Pod{pod}, nil)
				want = placed["p"]
			}
			for i := range len(app.Spec.Subsets) + 1 {
				name := "op-default"
				if i < len(app.Spec.Subsets) {
					name = "op-" + app.Spec.Subsets[i].Name
				}
				selectors, ok := podsOf(app, i)
				require.True(t, ok)
				matches := 0
				for _, s := range selectors {
					selector, err := metav1.LabelSelectorAsSelector(s)
					require.NoError(t, err)
					if selector.Matches(labels.Set(pod.Labels)) {
						matches++
					}
				}
				expected := 0
				if name == want {
					expected = 1
				}
				require.Equal(t, expected, matches, "%s of %v has labels %v", name, app.Spec.Subsets, pod.Labels)
			}
		}
	}
}

func TestSubsetsWithoutSharedLabelsNeedOneSelector(t *testing.T) {
	app := readApp(t, "controllermesh-virtualapp")
	app.Spec.Subsets = append(app.Spec.Subsets, kruise.VirtualAppSubset{Name: "v3", Labels: map[string]string{"version": "v3"}})
	selectors, ok := podsOf(app, 1)
	require.True(t, ok)
	require.Equal(t, []*metav1.LabelSelector{selector("component", "test-operator", "version", "v3")}, selectors)
}
