package layout

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

func pattern(s string) v1alpha1.NamespaceMatch { return v1alpha1.NamespaceMatch{Pattern: s} }

func tier(s string) v1alpha1.NamespaceMatch {
	return v1alpha1.NamespaceMatch{Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"tier": s}}}
}

// advance does as much as a number of evaluations allows.
func advance(x *Resolution, evaluations int) (done bool) {
	return x.Step(func() bool {
		evaluations--
		return evaluations > 0
	})
}

// What is kept from round to round, whatever changes, gives what one round alone gives.
func TestResolverAgreesWithOneRound(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	var r Resolver
	namespaces := map[string]labels.Set{}
	matches := []v1alpha1.NamespaceMatch{pattern("^a"), pattern("[0-4]$"), tier("one"), tier("two"), {Names: []string{"named"}}}
	for range 500 {
		for range random.IntN(4) {
			name := fmt.Sprintf("%c-%d", 'a'+rune(random.IntN(3)), random.IntN(20))
			if random.IntN(3) == 0 {
				delete(namespaces, name)
			} else {
				namespaces[name] = labels.Set{"tier": []string{"one", "two", "three"}[random.IntN(3)], v1alpha1.OwnerShardLabel: []string{"", "op-v2"}[random.IntN(2)]}
			}
		}
		r.Observe(maps.Clone(namespaces))
		spec := v1alpha1.ShardingConfigSpec{Root: subsets(), Limits: []v1alpha1.ObjectLimiter{{}, {}}}
		for i := range spec.Limits {
			for range random.IntN(3) {
				spec.Limits[i].Namespaces = append(spec.Limits[i].Namespaces, matches[random.IntN(len(matches))])
			}
		}
		spec.Root.Subsets[1].Namespaces = []v1alpha1.NamespaceMatch{matches[random.IntN(2)]}
		want := *spec.DeepCopy()
		wanted := Resolve(&want, namespaces)
		x := r.Begin("1", &spec)
		for !advance(x, 1+random.IntN(5)) {
			continue
		}
		require.Equal(t, wanted, x.Finish())
		require.Equal(t, want, spec)
		r.Sweep()
	}
}

func TestKnownNamespacesAreNotMatchedAgain(t *testing.T) {
	var r Resolver
	namespaces := map[string]labels.Set{"canary-1": nil, "b": nil}
	round := func() (evaluations int) {
		r.Observe(maps.Clone(namespaces))
		x := r.Begin("1", &v1alpha1.ShardingConfigSpec{Root: subsets()})
		require.True(t, x.Step(func() bool {
			evaluations++
			return true
		}))
		require.NoError(t, x.Finish())
		r.Sweep()
		return evaluations
	}
	const entries, lists = 3, 2
	require.Equal(t, entries+lists*2, round())
	require.Zero(t, round())
	namespaces["c"] = nil
	require.Equal(t, lists, round())
	namespaces["b"] = labels.Set{"tier": "one"}
	require.Equal(t, lists, round())
	delete(namespaces, "b")
	require.Zero(t, round())
	r.Sweep() // the configuration was deleted
	require.Empty(t, r.lists)
}

// Others do not wait for a configuration, and its own shards do not act by half of it.
func TestPendingConfigurationKeepsWhatItHad(t *testing.T) {
	var r Resolver
	r.Observe(map[string]labels.Set{"a-1": nil, "a-2": nil, "b-1": nil})
	resolve := func(evaluations int, limit string) (v1alpha1.ShardingConfigSpec, error) {
		spec := v1alpha1.ShardingConfigSpec{Root: subsets(), Limits: []v1alpha1.ObjectLimiter{
			{RelateResources: []v1alpha1.ResourceGroup{{Resources: []string{"x"}}}, Namespaces: []v1alpha1.NamespaceMatch{pattern(limit)}},
		}}
		spec.Root.Subsets = spec.Root.Subsets[1:]
		x := r.Begin("1", &spec)
		advance(x, evaluations)
		err := x.Finish()
		r.Sweep()
		return spec, err
	}
	spec, err := resolve(2, "^a-")
	require.ErrorIs(t, err, ErrPending)
	require.Subset(t, []string{"a-1", "a-2"}, Named(spec.Limits[0].Namespaces), "as far as it is known")
	require.Equal(t, subsets().Subsets[1:], spec.Root.Subsets)

	spec, err = resolve(100, "^a-")
	require.NoError(t, err)
	require.Equal(t, []string{"a-1", "a-2"}, Named(spec.Limits[0].Namespaces))
	spec, err = resolve(2, "^b-")
	require.ErrorIs(t, err, ErrPending)
	require.ErrorContains(t, err, "spec.limits: matching takes longer than other configurations can wait for")
	require.Equal(t, []string{"a-1", "a-2"}, Named(spec.Limits[0].Namespaces), "what it had")
	spec, err = resolve(100, "^b-")
	require.NoError(t, err)
	require.Equal(t, []string{"b-1"}, Named(spec.Limits[0].Namespaces))
}

func TestPatternsOfAListAreBounded(t *testing.T) {
	var many []v1alpha1.NamespaceMatch
	for i := range 9 {
		many = append(many, pattern(fmt.Sprintf("(?:.?){300}_%d", i)))
	}
	spec := v1alpha1.ShardingConfigSpec{Root: subsets()}
	spec.Root.Subsets[1].Namespaces = many
	require.EqualError(t, Resolve(&spec, nil), "subset v3 of spec.root.subsets: "+errPrograms.Error())
	require.ErrorContains(t, ValidateMatches(many, nil).ToAggregate(), errPrograms.Error())
	require.Empty(t, ValidateMatches(many[:7], nil))
}
