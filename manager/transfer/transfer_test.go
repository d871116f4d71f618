package transfer

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

func limits(keys ...string) []v1alpha1.ObjectLimiter {
	return []v1alpha1.ObjectLimiter{{
		RelateResources: []v1alpha1.ResourceGroup{{Resources: []string{"foos"}}},
		Selector: &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{
			{Key: v1alpha1.NamespaceLabel, Operator: metav1.LabelSelectorOpIn, Values: keys},
		}},
	}}
}

func config(name string, keys ...string) *v1alpha1.ShardingConfig {
	return &v1alpha1.ShardingConfig{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: types.UID(name), Generation: 1},
		Spec:       v1alpha1.ShardingConfigSpec{Limits: limits(keys...)},
	}
}

// keys returns what all limits select.
func keys(of []v1alpha1.ObjectLimiter) []string {
	var out []string
	for i, l := range of {
		values := l.Selector.MatchExpressions[0].Values
		if i == 0 {
			out = slices.Clone(values)
			continue
		}
		out = slices.DeleteFunc(out, func(k string) bool { return !slices.Contains(values, k) })
	}
	return out
}

// sent returns the keys that members are sent.
func sent(m Memory, c *v1alpha1.ShardingConfig) []string {
	if a, ok := m[c.UID]; ok && a.Sent == None {
		return nil
	}
	return keys(c.Spec.Limits)
}

func TestMembersActByWhatIsOnRecord(t *testing.T) {
	before, after := limits("a", "b"), limits("b", "c")
	record := func(of []v1alpha1.ObjectLimiter, shown bool) *v1alpha1.ActingLimits {
		out := &v1alpha1.ActingLimits{Hash: Hash(of)}
		if shown {
			out.Limits = of
		}
		return out
	}
	for _, c := range []struct {
		what     string
		record   *v1alpha1.ActingLimits
		observed int64
		sent     []string
	}{
		{"a new one", nil, 0, nil},
		{"one from before there were records", nil, 2, []string{"b", "c"}},
		{"one from before there were records, with another spec", nil, 1, nil},
		{"one that owns nothing", &v1alpha1.ActingLimits{Hash: None}, 2, nil},
		{"one that acts by its spec", record(after, false), 2, []string{"b", "c"}},
		{"one that acts by other limits", record(before, true), 2, []string{"b"}},
		{"limits that nobody knows", record(before, false), 2, nil},
		{"limits that are not those of the hash", &v1alpha1.ActingLimits{Hash: Hash(after) + "0", Limits: before}, 2, nil},
	} {
		t.Run(c.what, func(t *testing.T) {
			one := config("one", "b", "c")
			one.Generation, one.Status.ObservedGeneration, one.Status.Acting = 2, c.observed, c.record
			configs := []*v1alpha1.ShardingConfig{one}
			m := Memory{}.Enact(configs)
			require.Equal(t, c.sent, sent(m, configs[0]))
			require.Equal(t, after, one.Spec.Limits, "the argument is as it was")
		})
	}
}

func TestOnlyThoseThatOwnObjectsTransferThem(t *testing.T) {
	for what, change := range map[string]func(*v1alpha1.ShardingConfig){
		"root":        func(c *v1alpha1.ShardingConfig) { c.Spec.Root = &v1alpha1.RootConfig{} },
		"derived":     func(c *v1alpha1.ShardingConfig) { c.Labels = map[string]string{v1alpha1.RootLabel: "root"} },
		"dry run":     func(c *v1alpha1.ShardingConfig) { c.Spec.DryRun = true },
		"passthrough": func(c *v1alpha1.ShardingConfig) { c.Spec.ClientCertificates = v1alpha1.ClientCertificatesPassthrough },
		"shadow":      func(c *v1alpha1.ShardingConfig) { c.Spec.Shadow = &v1alpha1.Shadow{} },
		"undivided":   func(c *v1alpha1.ShardingConfig) { c.Spec.Limits = nil },
	} {
		c := config("one", "a")
		require.True(t, Divides(c))
		change(c)
		require.False(t, Divides(c), what)
		require.Empty(t, Memory{}.Enact([]*v1alpha1.ShardingConfig{c}), what)
	}
}

func TestShare(t *testing.T) {
	with := func(namespace string, locks ...string) *v1alpha1.ShardingConfig {
		c := &v1alpha1.ShardingConfig{ObjectMeta: metav1.ObjectMeta{Namespace: namespace}}
		for _, l := range locks {
			if c.Spec.Controller == nil {
				c.Spec.Controller = &v1alpha1.ControllerConfig{}
			}
			c.Spec.Controller.Locks = append(c.Spec.Controller.Locks, v1alpha1.LockReference{Namespace: "kube-system", Name: l})
		}
		return c
	}
	require.True(t, Share(with("a", "x", "y"), with("a", "y")))
	require.True(t, Share(with("a", "x"), with("a")), "its locks are not known")
	require.False(t, Share(with("a", "x"), with("a", "y")))
	require.False(t, Share(with("a", "x"), with("b", "x")), "those of another namespace must not be able to delay it")
}

// world is an apiserver, a manager, and two pods of each configuration.
type world struct {
	configs  map[string]*v1alpha1.ShardingConfig
	created  int
	memory   Memory
	compiled []*v1alpha1.ShardingConfig          // as written, when they were compiled
	policies map[string][]string                 // what pods were sent last, by pod
	acts     map[string][]string                 // what pods act on, by pod
	written  map[string]*v1alpha1.ShardingConfig // compiled, by name
}

func pods(c *v1alpha1.ShardingConfig) []string {
	return []string{string(c.UID) + "/0", string(c.UID) + "/1"}
}

func (w *world) compile() {
	w.compiled, w.written = nil, map[string]*v1alpha1.ShardingConfig{}
	enacted := []*v1alpha1.ShardingConfig{}
	for _, name := range slices.Sorted(maps.Keys(w.configs)) {
		c := w.configs[name].DeepCopy()
		w.written[name] = c
		w.compiled, enacted = append(w.compiled, c), append(enacted, c)
	}
	w.memory = w.memory.Enact(enacted)
	before := w.policies
	w.policies = map[string][]string{}
	for pod := range before {
		w.policies[pod] = nil // refused, unless a configuration selects it
	}
	for _, c := range enacted {
		for _, pod := range pods(c) {
			w.policies[pod] = sent(w.memory, c)
		}
	}
}

// record writes the records of configurations that are as they were compiled; some writes fail.
func (w *world) record(fails func() bool) {
	next := map[string]*v1alpha1.ActingLimits{}
	for name, c := range w.configs {
		if w.follows(w.written[name]) {
			next[name] = w.next(c)
		}
	}
	for name, acting := range next {
		if c := w.configs[name]; !fails() {
			c.Status.Acting, c.Status.ObservedGeneration = acting, c.Generation
		}
	}
}

func (w *world) next(c *v1alpha1.ShardingConfig) *v1alpha1.ActingLimits {
	confirmed := true
	for pod, acts := range w.acts {
		confirmed = confirmed && slices.Equal(acts, w.policies[pod])
	}
	var others []Acting
	for _, o := range w.compiled {
		if confirmed = confirmed && w.follows(o); o.UID != c.UID {
			others = append(others, w.memory[o.UID])
		}
	}
	return w.memory[c.UID].Record(others, confirmed)
}

// follows reports whether a configuration is as it was compiled.
func (w *world) follows(compiled *v1alpha1.ShardingConfig) bool {
	if compiled == nil {
		return false
	}
	c := w.configs[compiled.Name]
	return c != nil && c.UID == compiled.UID && c.Generation == compiled.Generation && equal(c, compiled)
}

func equal(a, b *v1alpha1.ShardingConfig) bool {
	return fmt.Sprint(a.Status.Acting) == fmt.Sprint(b.Status.Acting)
}

// edit gives a configuration other keys, which no other one has, as admission requires.
func (w *world) edit(r *rand.Rand, name string) {
	var free []string
	for _, k := range []string{"a", "b", "c", "d", "e", "f"} {
		taken := false
		for other, c := range w.configs {
			taken = taken || other != name && slices.Contains(keys(c.Spec.Limits), k)
		}
		if !taken && r.IntN(3) > 0 {
			free = append(free, k)
		}
	}
	c := w.configs[name]
	if c == nil {
		w.created++
		c = config(name)
		c.UID = types.UID(fmt.Sprintf("%s-%d", name, w.created))
		w.configs[name] = c
		for _, pod := range pods(c) {
			w.acts[pod], w.policies[pod] = nil, nil
		}
	}
	c.Generation++
	if r.IntN(4) > 0 || len(c.Spec.Limits) > 3 {
		c.Spec.Limits = nil
	}
	c.Spec.Limits = append(slices.Clone(c.Spec.Limits), limits(free...)...)
}

// step does something at random, and returns what.
func (w *world) step(r *rand.Rand) string {
	name := []string{"one", "two", "three"}[r.IntN(3)]
	switch r.IntN(12) {
	case 0:
		w.edit(r, name)
		return fmt.Sprintf("%s wants %v", name, keys(w.configs[name].Spec.Limits))
	case 1:
		if r.IntN(4) == 0 {
			delete(w.configs, name)
			return name + " is deleted"
		}
	case 2:
		if r.IntN(6) == 0 {
			w.memory, w.compiled, w.written = nil, nil, nil
			return "another manager leads"
		}
	case 3, 4, 5:
		w.compile()
		return "compile"
	case 6, 7, 8:
		for pod := range w.acts {
			if r.IntN(2) == 0 {
				w.acts[pod] = w.policies[pod]
			}
		}
		return "agents confirm"
	default:
		w.record(func() bool { return r.IntN(3) == 0 })
		return "statuses are written"
	}
	return ""
}

// twoOwners returns pods of different configurations that act on one key.
func (w *world) twoOwners() string {
	owner := map[string]string{}
	for pod, acts := range w.acts {
		uid, _, _ := strings.Cut(pod, "/")
		for _, k := range acts {
			if other, ok := owner[k]; ok && other != uid {
				return fmt.Sprintf("%s and %s act on %s", other, uid, k)
			}
			owner[k] = uid
		}
	}
	return ""
}

func TestNoKeyHasTwoOwners(t *testing.T) {
	for seed := range uint64(150) {
		r := rand.New(rand.NewPCG(seed, 15))
		w := &world{configs: map[string]*v1alpha1.ShardingConfig{}, policies: map[string][]string{}, acts: map[string][]string{}}
		var history []string
		for range 300 {
			history = append(history, w.step(r))
			if two := w.twoOwners(); two != "" {
				require.Fail(t, two, "seed %d: %s", seed, strings.Join(history, "\n"))
			}
		}
		for range 4 { // once nothing else happens, each acts by its spec
			w.compile()
			maps.Copy(w.acts, w.policies)
			w.record(func() bool { return false })
		}
		w.compile()
		require.True(t, w.memory.Complete())
		for _, c := range w.configs {
			require.ElementsMatch(t, keys(c.Spec.Limits), w.policies[pods(c)[0]], "seed %d: %s", seed, c.Name)
		}
	}
}
