package manager

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	toolscache "k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/manager"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/manager/apiserver"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/controllers"
	"github.com/ctrlmesh/ctrlmesh/manager/failover"
	"github.com/ctrlmesh/ctrlmesh/manager/inject"
	"github.com/ctrlmesh/ctrlmesh/manager/label"
	"github.com/ctrlmesh/ctrlmesh/manager/locks"
	"github.com/ctrlmesh/ctrlmesh/manager/metrics"
	"github.com/ctrlmesh/ctrlmesh/manager/platform"
	"github.com/ctrlmesh/ctrlmesh/manager/push"
	"github.com/ctrlmesh/ctrlmesh/manager/roots"
	"github.com/ctrlmesh/ctrlmesh/manager/status"
	"github.com/ctrlmesh/ctrlmesh/manager/trust"
)

const (
	// settleEvents is how long the policies loop waits for more events.
	settleEvents = 50 * time.Millisecond
	// settleAcks is how long the roots loop does: each step of a handover waits for it.
	settleAcks = 10 * time.Millisecond
	// settleStatus is the same for statuses.
	settleStatus = 200 * time.Millisecond
)

// world is what the loops share.
type world struct {
	Options
	controllers.State
	live     client.Client // uncached
	kube     kubernetes.Interface
	cache    cache.Cache
	recorder events.EventRecorder
	elected  <-chan struct{}
	since    time.Time // when this replica began to write status
	leading  time.Time // when it began to hear of nodes

	authority *trust.Authority // the mesh CA
	egress    *trust.Authority
	serving   *trust.Serving
	push      *push.Server
	bundles   *inject.Bundles
	sweeper   *label.Sweeper
	failover  *failover.Failover
	roots     *roots.Roots
	locks     *locks.Keeper
	weigher   *roots.Weigher

	// until is when the policies change by themselves, as when the next FaultInjection
	// expires, for which agents do not wait. The policies loop alone has it.
	until time.Time
	// unread is since when the policies loop cannot read shares; zero: it can.
	unread time.Time
	// rendered is what the policies loop, which alone has it, need not render again.
	rendered compile.Cache
	// emptySince is since when hand-written configurations, by uid, have no members. The
	// locks loop alone has it.
	emptySince map[types.UID]time.Time
	// leaders are those of hand-written shards, which led names. The status loop alone
	// has them.
	leaders status.Leaders
	led     map[string]types.NamespacedName
	// statuses are what the status loop wrote last, by uid. It alone has them.
	statuses map[types.UID]*writtenStatus
	// nextStep is when the roots loop, which alone has it, takes the next step of a correction.
	nextStep time.Time
	traffic  traffic
	// published is the bundle by which the manager was last told to be verified.
	published []byte
}

// add adds all runnables and lets events wake them.
func (w *world) add(ctx context.Context, mgr manager.Manager) error {
	w.push.Changed, w.push.Counted = w.Changed.Agents.Notify, w.Changed.Counts.Notify
	w.sweeper.Changed = w.Changed.Stamping.Notify
	w.roots.Written, w.roots.Asked = w.Changed.Roots.Notify, w.Changed.Demands.Notify
	w.weigher.Changed = w.Changed.Weights.Notify
	for _, s := range w.controllers() {
		if err := mgr.Add(controllers.New(w.Log, s)); err != nil {
			return err
		}
	}
	for _, o := range []client.Object{
		&v1alpha1.ShardingConfig{}, &v1alpha1.CircuitBreaker{}, &v1alpha1.FaultInjection{}, &corev1.Pod{}, &corev1.Service{}, &discoveryv1.EndpointSlice{},
		metadataOf(namespaceKind), metadataOf(nodeKind),
	} {
		informer, err := w.cache.GetInformer(ctx, o, cache.BlockUntilSynced(false))
		if err != nil {
			return fmt.Errorf("watching %T: %w", o, err)
		}
		if _, err := informer.AddEventHandler(onChange(w.Changed.Objects.Notify)); err != nil {
			return err
		}
	}
	for _, r := range []manager.Runnable{
		leader(w.watchBundles),
		leader(w.sweeper.Run),
		leader(w.weigher.Run),
		leader(w.serveAgents),
		follower(w.follow),
		follower(w.watchPlatform),
	} {
		if err := mgr.Add(r); err != nil {
			return err
		}
	}
	return nil
}

// controllers are all controllers, and what each reads.
func (w *world) controllers() []controllers.Spec {
	on := func(sources ...controllers.Source) []controllers.Source { return sources }
	is := &w.Changed
	return []controllers.Spec{
		{
			Name: "policies", Reconcile: w.policies, Settle: settleEvents, Next: func() time.Time { return w.until },
			On: on(&is.Objects, w.Settings.When(otherTimeout), &is.MeshCA, &is.Roots, &is.Locks, &is.Shares),
		},
		{
			Name: "roots", Reconcile: w.keepRoots, Settle: settleAcks, Resync: 10 * time.Second, Next: func() time.Time { return w.nextStep },
			On: on(&w.Listed, &is.Agents, &is.Weights),
		},
		{Name: "locks", Reconcile: w.keepOperatorLocks, Settle: settleAcks, Resync: locks.Every, On: on(&is.Demands)},
		{Name: "failover", Reconcile: w.keepLocks, On: on(&is.Agents)},
		{
			Name: "trust", Reconcile: w.keepTrust, Settle: time.Second, Resync: time.Minute,
			On: on(w.Cluster.When(otherCluster), w.MeshBundle.When(controllers.Differ), w.EgressBundle.When(controllers.Differ)),
		},
		{
			Name: "bundles", Reconcile: w.keepBundles, Settle: settleEvents, Resync: 10 * time.Minute,
			On: on(&is.Bundles, &is.MeshCA, &is.EgressCA, w.Compiled.When(otherBundles)),
		},
		{
			Name: "stamp", Reconcile: w.keepStamp, Settle: settleEvents, Resync: time.Minute,
			On: on(&w.Settings, w.Compiled.When(otherConfigs)),
		},
		{
			Name: "status", Reconcile: w.keepStatus, Settle: settleStatus, Resync: 10 * time.Second,
			On: on(&w.Compiled, &is.Agents, &is.Locks, &is.Stamping),
		},
		{Name: "nodes", Reconcile: w.keepNodes, Settle: time.Second, Resync: 15 * time.Second, On: on(&is.Agents)},
		{ // All agents' reports trigger it, and the policies wait for it.
			Name: "shares", Reconcile: w.keepShares, Settle: settleAcks, Resync: 10 * time.Second, Rests: true,
			On: on(&w.Compiled, &is.Agents, &is.Recorded),
		},
		{
			Name: "traffic", Reconcile: w.keepTraffic, Settle: settleStatus, Resync: 10 * time.Second, Next: func() time.Time { return w.traffic.next },
			On: on(&w.Compiled, &is.Agents, &is.Counts, &is.Unrecorded),
		},
		{Name: "endpoint", Reconcile: w.keepEndpoint, Resync: 15 * time.Second},
	}
}

func otherTimeout(before, after *platform.Settings) bool {
	return before == nil || *before.APIServer.RequestTimeout != *after.APIServer.RequestTimeout
}

func otherCluster(before, after *meshv1.Cluster) bool {
	return before.GetVersion() != after.GetVersion()
}

// otherConfigs reports whether a configuration has changed. The controllers that read the
// apiserver do not run at every step of every pod.
func otherConfigs(before, after *controllers.Compiled) bool {
	return before == nil || !slices.EqualFunc(before.Configs, after.Configs, sameSpec)
}

// onChange calls notify for each event that changes an object's meaning. Writes of a
// status, which are mostly the manager's own, do not.
func onChange(notify func()) toolscache.ResourceEventHandler {
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

// leader and follower are runnables that only the leader runs, and all replicas.
type (
	leader   func(context.Context) error
	follower func(context.Context) error
)

func (f leader) Start(ctx context.Context) error   { return f(ctx) }
func (leader) NeedLeaderElection() bool            { return true }
func (f follower) Start(ctx context.Context) error { return f(ctx) }
func (follower) NeedLeaderElection() bool          { return false }

// policies compiles the world anew and pushes it.
func (w *world) policies(ctx context.Context) error {
	cluster, err := w.readCluster(ctx, w.cache)
	if err != nil {
		// What was known stands: agents must not forget where the apiserver is.
		cluster = w.Cluster.Load()
		w.Log.Warn("the apiserver's addresses are not known, the last ones stay", "error", err)
	} else {
		w.Cluster.Store(cluster)
	}

	l, listErr := w.list(ctx)
	if listErr != nil {
		return listErr
	}
	w.Listed.Store(l)
	known, ok := w.roots.Known(l.Configs, l.Namespaces)
	if !ok || !w.withHandWritten(known, l.Configs) {
		// Agents keep what they were told last, until it is known who holds what.
		return err
	}
	if openErr := w.openBook(ctx, l.Rules.Breakers); openErr != nil {
		return openErr
	}
	w.Sharing.Lock()
	c := &controllers.Compiled{Result: compile.Compile(l.Configs, l.Pods, known, l.Rules), Listed: l}
	w.push.Set(cluster, c.Policies)
	w.Compiled.Store(c)
	w.Sharing.Unlock()
	w.until = c.Until
	if again := time.Now().Add(sharesPatience); !w.unread.IsZero() && (c.Until.IsZero() || again.Before(c.Until)) {
		w.until = again
	}

	metrics.Members.Reset()
	for _, s := range c.Shards {
		metrics.Members.WithLabelValues(s.Namespace, s.Name).Set(float64(len(s.Members)))
	}
	return err
}

// keepLocks frees locks of the dead.
func (w *world) keepLocks(ctx context.Context) error {
	c := w.Compiled.Load()
	if c == nil {
		return nil
	}
	return w.failover.Round(ctx, c.Result)
}

func sameSpec(a, b *v1alpha1.ShardingConfig) bool {
	return a.UID == b.UID && a.Generation == b.Generation
}

// sameMeaning tells whether the policies loop makes the same of two states of an object.
func sameMeaning(before, after any) bool {
	switch a := after.(type) {
	case *metav1.PartialObjectMetadata: // slim: all that matters else is whether it exists
		b, ok := before.(*metav1.PartialObjectMetadata)
		return ok && maps.Equal(a.Labels, b.Labels)
	case *v1alpha1.ShardingConfig:
		b, ok := before.(*v1alpha1.ShardingConfig)
		return ok && sameSpec(a, b) && slices.Equal(compile.OperatorLocks(a, a.Status.Locks), compile.OperatorLocks(b, b.Status.Locks))
	case *v1alpha1.CircuitBreaker:
		b, ok := before.(*v1alpha1.CircuitBreaker)
		return ok && a.UID == b.UID && a.Generation == b.Generation && maps.Equal(a.Labels, b.Labels) &&
			a.Annotations[v1alpha1.RecoverAnnotation] == b.Annotations[v1alpha1.RecoverAnnotation]
	case *v1alpha1.FaultInjection:
		b, ok := before.(*v1alpha1.FaultInjection)
		return ok && a.UID == b.UID && a.Generation == b.Generation && maps.Equal(a.Labels, b.Labels) &&
			a.Status.ExpirationGeneration == b.Status.ExpirationGeneration && a.Status.ExpirationTime.Equal(b.Status.ExpirationTime)
	}
	return false
}

func (w *world) list(ctx context.Context) (*controllers.Listed, error) {
	var configs v1alpha1.ShardingConfigList
	var pods corev1.PodList
	var namespaces metav1.PartialObjectMetadataList
	namespaces.SetGroupVersionKind(namespaceKind)
	var breakers v1alpha1.CircuitBreakerList
	var injections v1alpha1.FaultInjectionList
	if err := errors.Join(
		w.cache.List(ctx, &configs), w.cache.List(ctx, &pods), w.cache.List(ctx, &namespaces),
		// Nobody changes these, and there may be many that have no effect.
		w.cache.List(ctx, &breakers, client.UnsafeDisableDeepCopy), w.cache.List(ctx, &injections, client.UnsafeDisableDeepCopy),
	); err != nil {
		return nil, err
	}
	out := &controllers.Listed{Rules: compile.Rules{Cache: &w.rendered, Now: time.Now(), Share: w.Book.Share, RequestTimeout: w.RequestTimeout()}}
	for i := range breakers.Items {
		out.Rules.Breakers = append(out.Rules.Breakers, &breakers.Items[i])
	}
	for i := range injections.Items {
		out.Rules.Injections = append(out.Rules.Injections, &injections.Items[i])
	}
	for i := range configs.Items {
		out.Configs = append(out.Configs, &configs.Items[i])
	}
	// A cache lists in no order.
	slices.SortFunc(out.Configs, func(a, b *v1alpha1.ShardingConfig) int { return strings.Compare(string(a.UID), string(b.UID)) })
	for i := range pods.Items {
		out.Pods = append(out.Pods, &pods.Items[i])
	}
	for _, n := range namespaces.Items {
		out.Namespaces = append(out.Namespaces, n.Name)
		if compile.ForbidsFaults(&n) {
			out.Rules.NoFaults = append(out.Rules.NoFaults, n.Name)
		}
	}
	slices.Sort(out.Namespaces)
	return out, nil
}

// serveAgents serves the agents' streams.
func (w *world) serveAgents(ctx context.Context) error {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", w.PushAddress)
	if err != nil {
		return err
	}
	w.Log.Info("leading: serving agents", "address", l.Addr().String())
	return w.push.Serve(ctx, l, w.serving.TLSConfig())
}

// ready is a readiness check: whoever is sent here can be served.
func (w *world) ready(*http.Request) error {
	if len(w.authority.Bundle()) == 0 || len(w.egress.Bundle()) == 0 || len(w.serving.Bundle()) == 0 {
		return errors.New("certificates are not loaded")
	}
	return nil
}

// clusterCA is the CA that verifies the real apiserver, as it is now.
func (w *world) clusterCA() []byte {
	if len(w.Config.CAData) > 0 {
		return w.Config.CAData
	}
	ca, err := os.ReadFile(w.Config.CAFile)
	if err != nil {
		w.Log.Error("reading the cluster's CA", "error", err)
		return nil
	}
	return ca
}

// apiServerNames are the names that stand for the apiserver.
func (w *world) apiServerNames() trust.Names {
	var addresses []netip.Addr
	if c := w.Cluster.Load(); c != nil {
		addresses = apiserver.Addresses(c)
	}
	return trust.APIServerNames(w.ClusterDomain, addresses...)
}
