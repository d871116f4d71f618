package dialect

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	kruise "github.com/ctrlmesh/ctrlmesh/api/kruise/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/internal/expression"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
)

var (
	spec    = field.NewPath("spec")
	route   = spec.Child("route")
	subsets = spec.Child("subsets")
)

// maxSelector is the maximum size of a VirtualApp's selector in bytes. The webhook entries of
// all VirtualApps are in one object.
const maxSelector = 2 << 10

// VirtualApp translates a VirtualApp to a root with subsets.
func VirtualApp(app *kruise.VirtualApp) (Translation, field.ErrorList) {
	v := virtualApp{VirtualApp: app, rules: map[string]int{}, users: map[string]string{}}
	v.Config = newConfig(app.ObjectMeta)
	v.Config.Spec.Reads, v.Config.Spec.Fence = v1alpha1.ReadsOwn, v1alpha1.FenceNamespace
	v.root = newRoot(app.Name)
	v.root.ClusterScoped = v1alpha1.ClusterScopedDefaultOnly
	v.Config.Spec.Root = v.root
	v.root.TargetSelector = app.Spec.Selector.DeepCopy()
	if empty(app.Spec.Selector) {
		v.errs = append(v.errs, field.Required(spec.Child("selector"), "name the pods of the operator: an empty selector would take every pod of the namespace"))
	}
	v.errs = append(v.errs, selects(app.Spec.Selector, spec.Child("selector"))...)
	if n := app.Spec.Selector.Size(); n > maxSelector {
		v.errs = append(v.errs, field.TooLong(spec.Child("selector"), "", maxSelector))
	}
	v.configuration()
	if app.Spec.Route != nil {
		v.route = *app.Spec.Route
	}
	if name := app.Name + "-" + v1alpha1.DefaultSubset; len(name) > validation.LabelValueMaxLength {
		v.errs = append(v.errs, field.Invalid(field.NewPath("metadata", "name"), app.Name, tooLong(name)))
	}
	v.indexRules()
	for i := range app.Spec.Subsets {
		v.subset(i)
	}
	if v.divided == nil {
		v.divided = everything()
	}
	v.root.ResourceSelector = []v1alpha1.ObjectLimiter{{RelateResources: v.divided}}
	for i, l := range v.route.GlobalLimits {
		v.globalLimit(l, route.Child("globalLimits").Index(i))
	}
	v.exempt()
	v.conclude()
	return v.Translation, checked(v.Config, v.errs)
}

// virtualApp is a VirtualApp during its translation.
type virtualApp struct {
	*kruise.VirtualApp
	Translation
	errs  field.ErrorList
	root  *v1alpha1.RootConfig
	route kruise.VirtualAppRoute
	rules map[string]int    // the index of each rule in spec.route.subRules
	users map[string]string // the subset that has a rule
	// divided are the resources of the rules for namespaces, dividedPairs their pairs, and
	// dividedBy the first such rule; nil before the first rule.
	divided      []v1alpha1.ResourceGroup
	dividedPairs []string
	dividedBy    *field.Path
	pairs        int // of group and resource, in all these rules
}

// tooLong returns the error of the name of a shard, which is the value of a label.
func tooLong(name string) string {
	return fmt.Sprintf("a shard would be named %s, which has more than %d characters: shorten metadata.name or the name of the subset", name, validation.LabelValueMaxLength)
}

func (v *virtualApp) configuration() {
	c := v.Spec.Configuration
	if c == nil {
		return
	}
	path := spec.Child("configuration")
	if ctl := c.Controller; ctl != nil {
		var election *string
		if ctl.LeaderElection != nil {
			election = &ctl.LeaderElection.LockName
		}
		lock, errs := lockOf(ctl.LeaderElectionName, election, path.Child("controller"))
		v.Config.Spec.Controller = lock
		v.errs = append(v.errs, errs...)
	}
	if w := c.Webhook; w != nil {
		webhook, errs := webhookOf(w.CertDir, w.Port, path.Child("webhook"))
		v.Config.Spec.Webhook = webhook
		v.errs = append(v.errs, errs...)
	}
	if o := c.RestConfigOverrides; o != nil && o.UserAgentOrPrefix != nil {
		v.Config.Spec.UserAgent = v.userAgent(*o.UserAgentOrPrefix, path.Child("restConfigOverrides", "userAgentOrPrefix"))
	}
}

// userAgent translates a change of the User-Agent.
func (v *virtualApp) userAgent(value string, path *field.Path) *v1alpha1.UserAgent {
	if value == "" || value[0] == ' ' || strings.ContainsFunc(value, func(r rune) bool { return r < ' ' || r > '~' }) {
		v.errs = append(v.errs, field.Invalid(path, value, "must be printable ASCII, and not begin with a space"))
		return nil
	}
	if strings.HasSuffix(value, "/") {
		return &v1alpha1.UserAgent{Prefix: value}
	}
	return &v1alpha1.UserAgent{Value: value}
}

func (v *virtualApp) indexRules() {
	for i, r := range v.route.SubRules {
		if _, found := v.rules[r.Name]; found {
			v.errs = append(v.errs, field.Duplicate(route.Child("subRules").Index(i).Child("name"), r.Name))
		}
		v.rules[r.Name] = i
	}
}

func (v *virtualApp) subset(i int) {
	in, path := v.Spec.Subsets[i], subsets.Index(i)
	out := v1alpha1.Subset{Name: in.Name, PodLabels: map[string]string{}}
	maps.Copy(out.PodLabels, in.Labels)
	if name := v.Name + "-" + in.Name; len(name) > validation.LabelValueMaxLength {
		v.errs = append(v.errs, field.Invalid(path.Child("name"), in.Name, tooLong(name)))
	}
	if len(in.Labels) == 0 {
		v.errs = append(v.errs, field.Required(path.Child("labels"), "name the labels of its pods: it would have all pods"))
	}
	if len(in.RouteRules) == 0 {
		v.errs = append(v.errs, field.Required(path.Child("routeRules"), "name rules of spec.route.subRules: the subset would own nothing"))
	}
	before := len(v.errs)
	for j, name := range in.RouteRules {
		path := path.Child("routeRules").Index(j)
		rule, found := v.rules[name]
		user, used := v.users[name]
		switch {
		case !found:
			v.errs = append(v.errs, field.NotFound(path, name))
			continue
		case used:
			v.errs = append(v.errs, field.Forbidden(path, fmt.Sprintf("subset %s has rule %s already, and a namespace belongs to one subset: write a rule for each subset", user, name)))
			continue
		}
		v.users[name] = in.Name
		for k, m := range v.route.SubRules[rule].Match {
			if match := v.match(m, route.Child("subRules").Index(rule).Child("match").Index(k)); match != nil {
				out.Namespaces = append(out.Namespaces, *match)
			}
		}
	}
	if len(out.Namespaces) == 0 && len(in.RouteRules) > 0 && len(v.errs) == before {
		v.errs = append(v.errs, field.Invalid(path.Child("routeRules"), in.RouteRules, "its rules match no namespaces, so that it would own nothing: add a namespaceSelector or a namespaceRegex"))
	}
	v.root.Subsets = append(v.root.Subsets, out)
}

// match translates an entry of a subset's rule. It returns nil if the entry is invalid or does
// not match namespaces.
func (v *virtualApp) match(m kruise.MatchLimitSelector, path *field.Path) *v1alpha1.NamespaceMatch {
	groups, errs := resourcesOf(m.Resources, path.Child("resources"))
	out, more := matchOf(m, path)
	if errs = append(errs, more...); len(errs) > 0 {
		v.errs = append(v.errs, errs...)
		return nil
	}
	if s := m.ObjectSelector; s != nil {
		if len(s.MatchLabels)+len(s.MatchExpressions) > 1 {
			v.errs = append(v.errs, field.Invalid(path.Child("objectSelector"), metav1.FormatLabelSelector(s), "cannot be negated for the other subsets: use one requirement"))
			return nil
		}
		v.warn(path.Child("objectSelector"), "single objects are not fenced")
		v.lacks(path.Child("objectSelector"), "the lists of a subset are not narrowed by labels of objects")
		return nil
	}
	if len(groups) == 0 {
		groups = everything()
	}
	if v.pairs += layout.Pairs(groups); v.pairs > layout.MaxPairs {
		v.errs = append(v.errs, field.Forbidden(path.Child("resources"), "with the rules before, "+layout.ManyPairs(v.pairs)))
		return nil
	}
	if v.dividedBy == nil {
		v.divided, v.dividedPairs, v.dividedBy = groups, pairs(groups), path
	} else if !slices.Equal(v.dividedPairs, pairs(groups)) {
		v.errs = append(v.errs, field.Forbidden(path.Child("resources"), "a namespace has one owner for all resources: list the same resources in every rule, or none"))
	}
	return out
}

func (v *virtualApp) globalLimit(m kruise.MatchLimitSelector, path *field.Path) {
	groups, errs := resourcesOf(m.Resources, path.Child("resources"))
	match, more := matchOf(m, path)
	if errs = append(errs, more...); len(errs) > 0 {
		v.errs = append(v.errs, errs...)
		return
	}
	limit := v1alpha1.ObjectLimiter{RelateResources: groups}
	if s := m.ObjectSelector; s != nil {
		for _, g := range groups {
			if slices.Contains(g.Resources, "*") {
				v.errs = append(v.errs, field.Invalid(path.Child("resources"), g.Resources, "name the resources: objectSelector would hide all objects without the labels"))
				return
			}
		}
		limit.Selector = s.DeepCopy()
		v.warn(path.Child("objectSelector"), "single objects are not fenced")
	} else {
		limit.Namespaces = []v1alpha1.NamespaceMatch{*match}
	}
	if len(groups) == 0 {
		limit.RelateResources = everything()
	}
	v.Config.Spec.Limits = append(v.Config.Spec.Limits, limit)
}

// exempt sets what every subset reads and writes.
func (v *virtualApp) exempt() {
	v.root.Shared = []v1alpha1.SharedObjects{{
		APIGroups: []string{"*"}, Resources: []string{"*"}, Writes: v1alpha1.SharedWritesEveryone,
	}}
	if v.Namespace != "" {
		v.root.Shared[0].Namespaces = []string{v.Namespace}
	} else { // the apiserver gives every object a namespace
		v.root.Shared = nil
	}
	path := route.Child("subsetPublicResources")
	all := slices.Equal(pairs(v.divided), pairs(everything()))
	for i, r := range v.route.SubsetPublicResources {
		groups, errs := resourcesOf([]kruise.APIGroupResource{r}, path.Index(i))
		v.errs = append(v.errs, errs...)
		for _, g := range groups {
			if !all && slices.ContainsFunc(v.divided, func(d v1alpha1.ResourceGroup) bool { return overlap(d, g) }) {
				v.errs = append(v.errs, field.Forbidden(path.Index(i), "the rules of spec.route.subRules divide these resources: list them in one of both places"))
			}
			v.root.Shared = append(v.root.Shared, v1alpha1.SharedObjects{APIGroups: g.APIGroups, Resources: g.Resources, Writes: v1alpha1.SharedWritesEveryone})
		}
	}
}

// conclude names what has no effect, or another effect than in the ancestor.
func (v *virtualApp) conclude() {
	for i, r := range v.route.SubRules {
		if _, used := v.users[r.Name]; !used {
			v.warn(route.Child("subRules").Index(i), "rule %s has no effect: no subset lists it in routeRules", r.Name)
		}
	}
	v.defaultOnly(route.Child("subsetDefaultOnlyUserAgents"))
	if len(v.Spec.Subsets) == 0 {
		v.warn(subsets, "the default subset owns all namespaces, where openkruise denies requests for all of them")
		return
	}
	v.warn(subsets, "every subset reads cluster-scoped objects, where openkruise serves them to the default subset alone")
}

// defaultOnly sets which clients the default subset alone serves.
func (v *virtualApp) defaultOnly(path *field.Path) {
	for i, agent := range v.route.SubsetDefaultOnlyUserAgents {
		if agent == "" || strings.HasSuffix(agent, "*") {
			v.errs = append(v.errs, field.Invalid(path.Index(i), agent, `name a User-Agent exactly: it must not be empty, or end with "*"`))
		}
	}
	v.root.DefaultOnlyUserAgents = slices.Clone(v.route.SubsetDefaultOnlyUserAgents)
	if len(v.root.DefaultOnlyUserAgents) > 0 && v.Config.Spec.UserAgent != nil {
		v.warn(path, "it is compared with the User-Agents of the clients, where openkruise compares it with the result of userAgentOrPrefix")
	}
}

// matchOf translates an entry that matches namespaces. It returns nil for one that matches
// objects.
func matchOf(m kruise.MatchLimitSelector, path *field.Path) (*v1alpha1.NamespaceMatch, field.ErrorList) {
	set := []bool{m.NamespaceSelector != nil, m.NamespaceRegex != nil, m.ObjectSelector != nil}
	switch {
	case collect.Count(set, func(is bool) bool { return is }) != 1:
		return nil, field.ErrorList{field.Required(path, "set one of namespaceSelector, namespaceRegex and objectSelector")}
	case m.NamespaceSelector != nil:
		return &v1alpha1.NamespaceMatch{Selector: m.NamespaceSelector.DeepCopy()}, selects(m.NamespaceSelector, path.Child("namespaceSelector"))
	case m.NamespaceRegex != nil:
		return patternOf(*m.NamespaceRegex, path.Child("namespaceRegex"))
	case empty(m.ObjectSelector):
		return nil, field.ErrorList{field.Required(path.Child("objectSelector"), "select some objects: an empty selector selects all")}
	case len(m.Resources) == 0:
		return nil, field.ErrorList{field.Required(path.Child("resources"), "objectSelector requires resources: list whose labels it selects")}
	}
	return nil, selects(m.ObjectSelector, path.Child("objectSelector"))
}

func patternOf(pattern string, path *field.Path) (*v1alpha1.NamespaceMatch, field.ErrorList) {
	if pattern == "" {
		return nil, field.ErrorList{field.Required(path, `write a regular expression; ".*" matches all namespaces`)}
	}
	if _, err := expression.Compile(pattern); err != nil {
		return nil, field.ErrorList{field.Invalid(path, pattern, err.Error())}
	}
	return &v1alpha1.NamespaceMatch{Pattern: pattern}, nil
}

// resourcesOf translates lists of resources.
func resourcesOf(in []kruise.APIGroupResource, path *field.Path) (out []v1alpha1.ResourceGroup, errs field.ErrorList) {
	for i, r := range in {
		path := path.Index(i)
		if len(r.APIGroups) == 0 {
			errs = append(errs, field.Required(path.Child("apiGroups"), "list names"))
		}
		if len(r.Resources) == 0 {
			errs = append(errs, field.Required(path.Child("resources"), "list names"))
		}
		errs = append(errs, aloneStar(r.APIGroups, path.Child("apiGroups"))...)
		errs = append(errs, aloneStar(r.Resources, path.Child("resources"))...)
		for j, name := range r.Resources {
			if base, _, sub := strings.Cut(name, "/"); sub {
				errs = append(errs, field.Invalid(path.Child("resources").Index(j), name, "subresources follow their resource: write "+base))
			}
		}
		out = append(out, v1alpha1.ResourceGroup{APIGroups: slices.Clone(r.APIGroups), Resources: slices.Clone(r.Resources)})
	}
	return out, errs
}

// everything returns all resources.
func everything() []v1alpha1.ResourceGroup {
	return []v1alpha1.ResourceGroup{{APIGroups: []string{"*"}, Resources: []string{"*"}}}
}

// pairs returns the pairs of group and resource that groups name, sorted.
func pairs(groups []v1alpha1.ResourceGroup) (out []string) {
	for _, g := range groups {
		for _, group := range g.APIGroups {
			for _, resource := range g.Resources {
				out = append(out, resource+"."+group)
			}
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// overlap reports whether some resource is in both groups.
func overlap(a, b v1alpha1.ResourceGroup) bool {
	common := func(a, b []string) bool {
		return slices.Contains(a, "*") || slices.Contains(b, "*") || slices.ContainsFunc(a, func(v string) bool { return slices.Contains(b, v) })
	}
	return common(a.APIGroups, b.APIGroups) && common(a.Resources, b.Resources)
}
