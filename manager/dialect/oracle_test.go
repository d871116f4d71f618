package dialect

import (
	"fmt"
	"math/rand/v2"
	"regexp"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	kruise "github.com/ctrlmesh/ctrlmesh/api/kruise/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
	"github.com/ctrlmesh/ctrlmesh/manager/validate"
)

// defaultSubset is openkruise's name of the default subset.
const defaultSubset = ""

// oracle decides as openkruise's proxy does, for namespaced requests.
type oracle struct {
	app        *kruise.VirtualApp
	namespaces map[string]labels.Set
}

// passes reports whether the proxy of a subset's pod lets a request pass.
func (o oracle) passes(namespace string, resource kruise.APIGroupResource, subset string) bool {
	for _, limit := range o.app.Spec.Route.GlobalLimits {
		if o.concerns(limit.Resources, resource) && !o.matches(limit, namespace) {
			return false
		}
	}
	public := o.listed(o.app.Spec.Route.SubsetPublicResources, resource)
	owner, found, restricted := o.owner(namespace, resource, public)
	if found {
		return owner == subset
	}
	return public && !restricted
}

// owner returns the first subset with a rule that matches, in the order of the subsets. The
// default subset, which comes last, owns what no rule matches. Rules without resources do not
// concern public ones. restricted reports whether a rule lists the resource.
func (o oracle) owner(namespace string, resource kruise.APIGroupResource, public bool) (subset string, found, restricted bool) {
	concerned := false
	for _, s := range o.app.Spec.Subsets {
		for _, rule := range o.app.Spec.Route.SubRules {
			if !slices.Contains(s.RouteRules, rule.Name) {
				continue
			}
			for _, m := range rule.Match {
				switch {
				case len(m.Resources) > 0 && !o.listed(m.Resources, resource), len(m.Resources) == 0 && public:
					continue
				case len(m.Resources) > 0:
					restricted = true
				}
				concerned = true
				if !found && o.matches(m, namespace) {
					subset, found = s.Name, true
				}
			}
		}
	}
	return subset, found || concerned, restricted
}

func (oracle) listed(list []kruise.APIGroupResource, resource kruise.APIGroupResource) bool {
	has := func(list []string, v string) bool {
		return len(list) == 1 && list[0] == "*" || slices.Contains(list, v)
	}
	return slices.ContainsFunc(list, func(r kruise.APIGroupResource) bool {
		return has(r.APIGroups, resource.APIGroups[0]) && has(r.Resources, resource.Resources[0])
	})
}

func (o oracle) concerns(list []kruise.APIGroupResource, resource kruise.APIGroupResource) bool {
	return len(list) == 0 || o.listed(list, resource)
}

func (o oracle) matches(m kruise.MatchLimitSelector, namespace string) bool {
	if m.NamespaceRegex != nil {
		return regexp.MustCompile(*m.NamespaceRegex).MatchString(namespace)
	}
	selector, err := metav1.LabelSelectorAsSelector(m.NamespaceSelector)
	return err == nil && selector.Matches(o.namespaces[namespace])
}

// native decides as the translation says.
type native struct {
	config *v1alpha1.ShardingConfig
	owners map[string]string // shards by namespace
	// limited are the namespaces of each limit.
	limited []map[string]bool
}

func newNative(t testing.TB, config *v1alpha1.ShardingConfig, namespaces map[string]labels.Set) native {
	n := native{config: config, owners: map[string]string{}}
	spec := config.Spec.DeepCopy()
	require.NoError(t, layout.Resolve(spec, namespaces))
	for shard, scope := range layout.First(spec.Root, nil) {
		for name := range namespaces {
			if scope.Owns(name) {
				require.Empty(t, n.owners[name], "two shards own namespace %s", name)
				n.owners[name] = shard
			}
		}
	}
	for _, limit := range spec.Limits {
		within := map[string]bool{}
		for _, name := range layout.Named(limit.Namespaces) {
			within[name] = true
		}
		n.limited = append(n.limited, within)
	}
	return n
}

func (n native) passes(namespace string, resource kruise.APIGroupResource, shard string) bool {
	for i, limit := range n.config.Spec.Limits {
		if n.listed(limit.RelateResources, resource) && !n.limited[i][namespace] {
			return false
		}
	}
	for _, s := range n.config.Spec.Root.Shared {
		of := []v1alpha1.ResourceGroup{{APIGroups: s.APIGroups, Resources: s.Resources}}
		if n.listed(of, resource) && (len(s.Namespaces) == 0 || slices.Contains(s.Namespaces, namespace)) {
			return true
		}
	}
	return n.owners[namespace] == shard
}

func (native) listed(list []v1alpha1.ResourceGroup, resource kruise.APIGroupResource) bool {
	has := func(list []string, v string) bool { return slices.Contains(list, "*") || slices.Contains(list, v) }
	return slices.ContainsFunc(list, func(g v1alpha1.ResourceGroup) bool {
		return has(g.APIGroups, resource.APIGroups[0]) && has(g.Resources, resource.Resources[0])
	})
}

// kinds are the resources of requests; the first two are listed by some rules.
var kinds = []kruise.APIGroupResource{
	{APIGroups: []string{"example.com"}, Resources: []string{"foos"}},
	{APIGroups: []string{"example.com"}, Resources: []string{"bars"}},
	{APIGroups: []string{""}, Resources: []string{"configmaps"}},
}

func randomMatch(random *rand.Rand, of []kruise.APIGroupResource) kruise.MatchLimitSelector {
	if random.IntN(2) == 0 {
		return kruise.MatchLimitSelector{NamespaceRegex: new([]string{"^a", "1$", "b|c", "[0-3]"}[random.IntN(4)]), Resources: of}
	}
	s := selector()
	switch tier := []string{"one", "two", "three"}[random.IntN(3)]; random.IntN(4) {
	case 0:
		s.MatchExpressions = []metav1.LabelSelectorRequirement{{Key: "tier", Operator: metav1.LabelSelectorOpNotIn, Values: []string{tier}}}
	case 1:
		s.MatchExpressions = []metav1.LabelSelectorRequirement{{Key: "tier", Operator: metav1.LabelSelectorOpExists}}
	default:
		s.MatchLabels["tier"] = tier
	}
	return kruise.MatchLimitSelector{NamespaceSelector: s, Resources: of}
}

func randomApp(random *rand.Rand) *kruise.VirtualApp {
	app := &kruise.VirtualApp{ObjectMeta: metav1.ObjectMeta{Namespace: "operator", Name: "op"}}
	app.Spec.Selector = selector("app", "op")
	app.Spec.Route = &kruise.VirtualAppRoute{}
	var of []kruise.APIGroupResource
	if random.IntN(3) == 0 {
		of = resources("example.com", "foos", "bars")
	}
	for range random.IntN(3) {
		var limited []kruise.APIGroupResource
		if random.IntN(2) == 0 {
			limited = kinds[:1]
		}
		app.Spec.Route.GlobalLimits = append(app.Spec.Route.GlobalLimits, randomMatch(random, limited))
	}
	if random.IntN(2) == 0 {
		app.Spec.Route.SubsetPublicResources = kinds[2:]
	}
	for i := range 1 + random.IntN(3) {
		rule := kruise.SubRule{Name: fmt.Sprintf("rule-%d", i)}
		for range 1 + random.IntN(3) {
			rule.Match = append(rule.Match, randomMatch(random, of))
		}
		app.Spec.Route.SubRules = append(app.Spec.Route.SubRules, rule)
		name := fmt.Sprintf("s%d", i)
		app.Spec.Subsets = append(app.Spec.Subsets, kruise.VirtualAppSubset{Name: name, Labels: map[string]string{"subset": name}, RouteRules: []string{rule.Name}})
	}
	return app
}

// The translation deviates from openkruise on purpose in what this test leaves out:
// cluster-scoped objects, which every subset may read; the operator's own namespace, which all
// subsets share; a VirtualApp without subsets, of which openkruise denies everything; and
// resources that no rule concerns while rules list others, which openkruise denies.
func TestTranslationDecidesAsOpenkruise(t *testing.T) {
	random := rand.New(rand.NewPCG(5, 6))
	passed, denied := 0, 0
	for range 300 {
		namespaces := map[string]labels.Set{}
		for i := range 12 {
			of := labels.Set{}
			if random.IntN(3) > 0 {
				of["tier"] = []string{"one", "two", "three"}[random.IntN(3)]
			}
			namespaces[fmt.Sprintf("%s%d", []string{"a", "b", "c"}[random.IntN(3)], i)] = of
		}
		app := randomApp(random)
		out, errs := VirtualApp(app)
		require.Empty(t, errs)
		require.Empty(t, validate.Config(out.Config))
		ours, theirs := newNative(t, out.Config, namespaces), oracle{app, namespaces}
		all := append([]kruise.VirtualAppSubset{{Name: defaultSubset}}, app.Spec.Subsets...)
		for name := range namespaces {
			for _, kind := range kinds {
				if listed := app.Spec.Route.SubRules[0].Match[0].Resources; len(listed) > 0 && !theirs.listed(listed, kind) && !theirs.listed(app.Spec.Route.SubsetPublicResources, kind) {
					continue
				}
				for _, s := range all {
					shard := "op-default"
					if s.Name != defaultSubset {
						shard = "op-" + s.Name
					}
					want := theirs.passes(name, kind, s.Name)
					require.Equal(t, want, ours.passes(name, kind, shard), "%s %v of subset %q: %+v", name, kind, s.Name, app.Spec)
					if want {
						passed++
					} else {
						denied++
					}
				}
			}
		}
	}
	require.Greater(t, passed, 1000)
	require.Greater(t, denied, 1000)
}
