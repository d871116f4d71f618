// Package policy compiles all configurations and pods and pushes the policies that follow.
package policy

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	kruise "github.com/ctrlmesh/ctrlmesh/api/kruise/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/manager/apiserver"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/controllers"
	"github.com/ctrlmesh/ctrlmesh/manager/dialect/serve"
	"github.com/ctrlmesh/ctrlmesh/manager/label"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
	"github.com/ctrlmesh/ctrlmesh/manager/locks"
	"github.com/ctrlmesh/ctrlmesh/manager/metrics"
	"github.com/ctrlmesh/ctrlmesh/manager/origin"
	"github.com/ctrlmesh/ctrlmesh/manager/platform"
	"github.com/ctrlmesh/ctrlmesh/manager/push"
	"github.com/ctrlmesh/ctrlmesh/manager/resources"
	"github.com/ctrlmesh/ctrlmesh/manager/roots"
	"github.com/ctrlmesh/ctrlmesh/manager/transfer"
)

// Controller compiles everything anew at each run. That is cheap, because its cost grows
// with operators and not with objects.
type Controller struct {
	// Client reads past the cache: the record of shares must not be stale.
	Client, Cache client.Reader
	// Pods returns the labelled pods, which must not be changed.
	Pods func(context.Context) ([]*corev1.Pod, error)
	// Namespace of the mesh.
	Namespace string
	// ClusterCA and MeshCA return the bundles that verify the apiserver and the agents.
	ClusterCA, MeshCA func() []byte
	Roots             *roots.Roots
	Keeper            *locks.Keeper
	Resources         *resources.Catalog
	Push              *push.Server
	State             *controllers.State
	// Dialects reports whether TrafficPolicies are served.
	Dialects bool
	Log      *slog.Logger

	// rendered is what need not be rendered again.
	rendered compile.Cache
	resolver roots.Resolver
	acting   transfer.Memory
	// until is when the policies change by themselves, as when the next FaultInjection
	// expires, for which agents do not wait.
	until time.Time
	// unread is since when the shares on record cannot be read; zero if they can.
	unread time.Time
}

// Spec implements controllers.Reconciler.
func (r *Controller) Spec() controllers.Spec {
	changed := &r.State.Changed
	return controllers.Spec{
		Name: "policies", Reconcile: r.Reconcile, Debounce: controllers.DebounceEvents,
		Next: func() time.Time { return r.until },
		On: []controllers.Source{
			&changed.Objects, &changed.Roots, &changed.Locks, &changed.Shares, &changed.Resources,
			&changed.MeshCA, // so that agents ask for a new leaf
			r.State.Settings.When(otherSettings), &r.State.Additional,
		},
	}
}

// otherSettings reports whether other policies follow from the settings.
func otherSettings(before, after *platform.Settings) bool {
	return before == nil || *before.APIServer.RequestTimeout != *after.APIServer.RequestTimeout || !slices.Equal(before.Undivided(), after.Undivided())
}

// Reconcile compiles and pushes.
func (r *Controller) Reconcile(ctx context.Context) error {
	more := r.State.Additional.Load()
	if more == nil {
		return nil // agents keep the addresses that the last leader resolved
	}
	cluster, err := apiserver.Read(ctx, r.Cache, r.Namespace, *more, r.ClusterCA(), r.MeshCA())
	if err != nil {
		// The last addresses stay: agents must not lose the apiserver's.
		cluster = r.State.Cluster.Load()
		r.Log.Warn("the apiserver's addresses are not known, the last ones stay", "error", err)
	} else {
		r.State.Cluster.Store(cluster)
	}

	l, known, listErr := r.list(ctx)
	if listErr != nil {
		return listErr
	}
	r.State.Listed.Store(l)
	if known == nil || !r.addHandWritten(known, l) {
		// Agents keep the last policies until it is known which shard owns what.
		return err
	}
	if openErr := r.openShares(ctx, l.Rules.Breakers); openErr != nil {
		return openErr
	}
	r.State.Sharing.Lock()
	c := &controllers.Compiled{Result: compile.Compile(l.Configs, l.Pods, known, l.Rules), Listed: l}
	r.Push.Set(cluster, c.Policies)
	r.State.Compiled.Store(c)
	r.State.Sharing.Unlock()
	r.until = c.Until
	if again := time.Now().Add(sharesPatience); !r.unread.IsZero() && (c.Until.IsZero() || again.Before(c.Until)) {
		r.until = again
	}
	if l.Resolved.Pending {
		r.until = time.Now()
	}
	count(c)
	return err
}

// count sets the metrics of configurations.
func count(c *controllers.Compiled) {
	metrics.Members.Reset()
	for _, s := range c.Shards {
		metrics.Members.WithLabelValues(s.Namespace, s.Name).Set(float64(len(s.Members)))
	}
	took := map[types.NamespacedName]float64{}
	for _, part := range []map[types.NamespacedName]time.Duration{c.Resolved.Took, c.Took} {
		for name, d := range part {
			took[name] += d.Seconds()
		}
	}
	metrics.CompileSeconds.Set(took)
}

// elapsed returns a clock that has started now.
func elapsed() func() time.Duration {
	began := time.Now()
	return func() time.Duration { return time.Since(began) }
}

// addHandWritten adds what is known of hand-written configurations: whether their
// members must be in standby, because a resource is unknown, or another pod may act on their
// objects or lead. It reports false until the lock controller has looked at the locks.
func (r *Controller) addHandWritten(known map[origin.Name]compile.Root, l *controllers.Listed) (ok bool) {
	for _, c := range l.Configs {
		if !compile.HandWritten(c) {
			continue
		}
		unknown := l.Unknown[c.UID]
		if unknown.Undetermined { // it may be known, and the members act
			unknown.Message = ""
		}
		if compile.Shadows(c) {
			known[origin.Of(c)] = compile.Root{Standby: unknown.Message, Locks: c.Status.Locks}
			continue
		}
		one := compile.Root{Standby: unknown.Message, Undivided: unknown.Message != ""}
		if l.Acting[c.UID].Sent == transfer.None {
			one.Standby = transfer.Standby
		}
		if len(compile.OperatorLocks(c, c.Status.Locks)) > 0 {
			if !r.State.LocksRead.Load() {
				return false
			}
			one.Locks, _ = locks.Survey(c, c.Status.Locks, nil, nil, r.Keeper)
			if why := unheld(compile.NamedLocks(c), r.Keeper.States(client.ObjectKeyFromObject(c))); why != "" {
				one.Standby = why
			}
		}
		known[origin.Of(c)] = one
	}
	return true
}

// unheld returns why a pod outside the mesh may lead beside the members of a hand-written
// configuration, by what is known of the locks that it names; empty if none may.
func unheld(names []types.NamespacedName, known func(types.NamespacedName) (locks.State, bool)) string {
	for _, name := range names {
		switch s, _ := known(name); {
		case !s.Held:
			return compile.Unheld(name)
		case s.Asked == 0:
			// There were no members when the keeper looked last, so that it may be about to release it.
			return fmt.Sprintf("the mesh is about to confirm that it keeps lock %s", name)
		}
	}
	return ""
}

// list reads the cache. known has the states of roots; nil while one of them is not known.
func (r *Controller) list(ctx context.Context) (out *controllers.Listed, known map[origin.Name]compile.Root, err error) {
	var configs v1alpha1.ShardingConfigList
	var namespaces metav1.PartialObjectMetadataList
	namespaces.SetGroupVersionKind(controllers.NamespaceKind)
	var breakers v1alpha1.CircuitBreakerList
	var injections v1alpha1.FaultInjectionList
	pods, err := r.Pods(ctx)
	if err = errors.Join(err,
		r.Cache.List(ctx, &configs),
		// These are not changed here, and there may be very many.
		r.Cache.List(ctx, &namespaces, client.UnsafeDisableDeepCopy),
		r.Cache.List(ctx, &breakers, client.UnsafeDisableDeepCopy), r.Cache.List(ctx, &injections, client.UnsafeDisableDeepCopy),
	); err != nil {
		return nil, nil, err
	}
	out = &controllers.Listed{Rules: compile.Rules{Cache: &r.rendered, Now: time.Now(), Elapsed: elapsed(), Share: r.State.Allocator.Share, RequestTimeout: r.State.RequestTimeout()}}
	out.Rules.Breakers, out.Rules.Injections = collect.Pointers(breakers.Items), collect.Pointers(injections.Items)
	if r.Dialects {
		if out.TrafficPolicies, err = serve.Policies(ctx, r.Cache); err != nil {
			return nil, nil, err
		}
		for _, p := range out.TrafficPolicies {
			out.Rules.Breakers = append(out.Rules.Breakers, p.Breakers...)
		}
	}
	out.Configs, out.Pods = collect.Pointers(configs.Items), pods
	// A cache lists in no order.
	slices.SortFunc(out.Configs, func(a, b *v1alpha1.ShardingConfig) int { return strings.Compare(string(a.UID), string(b.UID)) })
	labelled := make(map[string]labels.Set, len(namespaces.Items))
	for _, n := range namespaces.Items {
		out.Namespaces = append(out.Namespaces, n.Name)
		labelled[n.Name] = n.Labels
		if compile.ForbidsFaults(&n) {
			out.Rules.NoFaults = append(out.Rules.NoFaults, n.Name)
		}
	}
	slices.Sort(out.Namespaces)
	out.Unknown = r.unknown(out.Configs)
	if states, ok := r.Roots.States(out.Configs, out.Namespaces); ok {
		known = states
		for _, c := range out.Configs {
			if root, ok := known[origin.Of(c)]; ok {
				_, root.Undivided = out.Unknown[c.UID]
				known[origin.Of(c)] = root
			}
		}
		out.Enacted = roots.Enact(out.Configs, known)
	}
	r.acting = r.acting.Enact(out.Configs)
	out.Acting = r.acting
	within := resolveWithin
	if r.State.Compiled.Load() == nil {
		within = resolveFirst
	}
	out.Resolved = r.resolver.Resolve(out.Configs, labelled, within)
	origin.Conflicts(out.Configs)
	for _, c := range out.Configs {
		layout.Exclude(&c.Spec, r.State.Settings.Load().Undivided())
	}
	return out, known, nil
}

// unknown returns the resources that configurations name and that are not served.
func (r *Controller) unknown(configs []*v1alpha1.ShardingConfig) map[types.UID]resources.Unknown {
	out := map[types.UID]resources.Unknown{}
	for _, c := range configs {
		if u := r.Resources.Unknown(label.Divided(c)); u.Message != "" && !compile.Derived(c) {
			out[c.UID] = u
		}
	}
	r.Resources.Expect(len(out) > 0)
	return out
}

const (
	// resolveWithin is how long all roots together are matched with namespaces before policies
	// are pushed. For the first policies it is resolveFirst: nothing is known of any root, and
	// agents keep the last ones.
	resolveWithin = 100 * time.Millisecond
	resolveFirst  = 5 * time.Second
	// sharesPatience is how long policies wait for the shares on record, and after which
	// those that go on without ask again.
	sharesPatience = 10 * time.Second
	// pageOfBreakers are read at once; they may be large.
	pageOfBreakers = 20
)

// openShares reads the record of CircuitBreakers whose members share, or did, before their
// rules are pushed. For sharesPatience all policies wait for that. Then the rules that
// cannot be read are not shared out, and the others are pushed.
func (r *Controller) openShares(ctx context.Context, breakers []*v1alpha1.CircuitBreaker) error {
	there, unread := map[types.NamespacedName]bool{}, map[types.NamespacedName]bool{}
	for _, c := range breakers {
		name := client.ObjectKeyFromObject(c)
		there[name] = true
		if r.State.Allocator.Lacks(c) {
			unread[name] = true
		}
	}
	if err := r.readShares(ctx, unread); err == nil {
		r.unread = time.Time{}
	} else {
		if r.unread.IsZero() {
			r.unread = time.Now()
		}
		if err = fmt.Errorf("reading the shares on record of CircuitBreakers: %w", err); time.Since(r.unread) < sharesPatience {
			return err
		}
		r.Log.Warn("rules of scope Workload that are not shared out yet refuse all requests", "error", err)
	}
	r.State.Allocator.Close(func(name types.NamespacedName) bool { return there[name] })
	return nil
}

// readShares opens State.Allocator at these CircuitBreakers. It reads past the cache.
func (r *Controller) readShares(ctx context.Context, unread map[types.NamespacedName]bool) error {
	if len(unread) == 0 {
		return nil
	}
	in := map[string]bool{}
	namespace := metav1.NamespaceAll
	for name := range unread {
		in[name.Namespace] = true
		namespace = name.Namespace
	}
	if len(in) > 1 {
		namespace = metav1.NamespaceAll
	}
	var live v1alpha1.CircuitBreakerList
	for page := ""; ; page = live.Continue {
		live = v1alpha1.CircuitBreakerList{}
		if err := r.Client.List(ctx, &live, client.InNamespace(namespace), client.Limit(pageOfBreakers), client.Continue(page)); err != nil {
			return err
		}
		for i := range live.Items {
			if name := client.ObjectKeyFromObject(&live.Items[i]); unread[name] {
				r.State.Allocator.Open(name, live.Items[i].Status)
				delete(unread, name)
			}
		}
		if live.Continue == "" {
			break
		}
	}
	for name := range unread { // it was deleted
		r.State.Allocator.Open(name, v1alpha1.CircuitBreakerStatus{})
	}
	return nil
}

// OnChange calls notify for each event that may change a policy. Writes of the status of
// the mesh's own objects, which are mostly the manager's, do not.
func OnChange(notify func()) toolscache.ResourceEventHandler {
	return toolscache.ResourceEventHandlerFuncs{
		AddFunc:    func(any) { notify() },
		DeleteFunc: func(any) { notify() },
		UpdateFunc: func(before, after any) {
			if !sameMeaning(before, after) {
				notify()
			}
		},
	}
}

// sameMeaning reports whether the same policies follow from two states of an object.
func sameMeaning(before, after any) bool {
	switch a := after.(type) {
	case *metav1.PartialObjectMetadata: // slim: all that matters else is whether it exists
		b, ok := before.(*metav1.PartialObjectMetadata)
		return ok && maps.Equal(a.Labels, b.Labels)
	case *v1alpha1.ShardingConfig:
		b, ok := before.(*v1alpha1.ShardingConfig)
		return ok && sameConfig(a, b)
	case *v1alpha1.CircuitBreaker:
		b, ok := before.(*v1alpha1.CircuitBreaker)
		return ok && sameRules(a, b) && a.Annotations[v1alpha1.RecoverAnnotation] == b.Annotations[v1alpha1.RecoverAnnotation]
	case *kruise.TrafficPolicy:
		b, ok := before.(*kruise.TrafficPolicy)
		return ok && sameRules(a, b)
	case *v1alpha1.FaultInjection:
		b, ok := before.(*v1alpha1.FaultInjection)
		return ok && sameRules(a, b) &&
			a.Status.ExpirationGeneration == b.Status.ExpirationGeneration && a.Status.ExpirationTime.Equal(b.Status.ExpirationTime)
	}
	a, dialect := serve.Config(after)
	b, same := serve.Config(before)
	return dialect && same && sameConfig(a, b)
}

// sameConfig reports whether two states of a configuration have the same spec and locks, and
// members that act by the same limits.
func sameConfig(a, b *v1alpha1.ShardingConfig) bool {
	return compile.SameSpec(a, b) && equality.Semantic.DeepEqual(a.Status.Acting, b.Status.Acting) && slices.Equal(compile.OperatorLocks(a, a.Status.Locks), compile.OperatorLocks(b, b.Status.Locks))
}

// sameRules reports whether two states of an object have the same spec and labels.
func sameRules(a, b metav1.Object) bool {
	return a.GetUID() == b.GetUID() && a.GetGeneration() == b.GetGeneration() && maps.Equal(a.GetLabels(), b.GetLabels())
}
