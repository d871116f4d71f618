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
	"sync"
	"sync/atomic"
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
	"github.com/ctrlmesh/ctrlmesh/manager/failover"
	"github.com/ctrlmesh/ctrlmesh/manager/inject"
	"github.com/ctrlmesh/ctrlmesh/manager/label"
	"github.com/ctrlmesh/ctrlmesh/manager/locks"
	"github.com/ctrlmesh/ctrlmesh/manager/metrics"
	"github.com/ctrlmesh/ctrlmesh/manager/platform"
	"github.com/ctrlmesh/ctrlmesh/manager/push"
	"github.com/ctrlmesh/ctrlmesh/manager/quota"
	"github.com/ctrlmesh/ctrlmesh/manager/roots"
	"github.com/ctrlmesh/ctrlmesh/manager/status"
	"github.com/ctrlmesh/ctrlmesh/manager/trust"
)

const (
	// settleEvents is how long the policies loop waits for more events.
	settleEvents = 50 * time.Millisecond
	// settleAcks is how long the roots loop does: each step of a handover waits for it.
	settleAcks = 10 * time.Millisecond
)

// world is what the loops share.
type world struct {
	Options
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

	cluster  atomic.Pointer[meshv1.Cluster]
	settings atomic.Pointer[platform.Settings] // the administrator's; never nil once loaded
	listed   atomic.Pointer[listed]
	compiled atomic.Pointer[compiled]
	// bundled and egressBundled are the bundles that all namespaces have.
	bundled, egressBundled atomic.Pointer[[]byte]
	// later wakes the policies loop, which alone sets it.
	later *time.Timer
	book  quota.Book
	// unread is since when the policies loop cannot read shares; zero: it can.
	unread time.Time
	// rendered is what the policies loop, which alone has it, need not render again.
	rendered compile.Cache
	// locksKnown: the operators' locks were looked at.
	locksKnown atomic.Bool
	// emptySince is since when hand-written configurations, by uid, have no members. The
	// locks loop alone has it.
	emptySince map[types.UID]time.Time
	// leaders are those of hand-written shards, which led names. The status loop alone
	// has them.
	leaders status.Leaders
	led     map[string]types.NamespacedName
	// statuses are what the status loop wrote last, by uid. It alone has them.
	statuses map[types.UID]*writtenStatus
	// nextStep wakes the roots loop, which alone has it, for the next step of a correction.
	nextStep *time.Timer
	// sharing is held while shares are decided, and until what was is pushed.
	sharing sync.Mutex
	traffic traffic
	// published is the bundle by which the manager was last told to be verified.
	published []byte

	policiesLoop, rootsLoop, locksLoop, failoverLoop, trustLoop, bundlesLoop, stampLoop, statusLoop, nodesLoop, sharesLoop, trafficLoop *loop
}

// listed is what was there when the policies loop looked last.
type listed struct {
	pods       []*corev1.Pod
	configs    []*v1alpha1.ShardingConfig
	namespaces []string // sorted
	rules      compile.Rules
}

// compiled is the last outcome of the policies loop.
type compiled struct {
	compile.Result
	*listed
}

// add adds all runnables and lets events wake them.
func (w *world) add(ctx context.Context, mgr manager.Manager) error {
	w.policiesLoop = newLoop(w.Log, "policies", settleEvents, 0, w.policies)
	w.rootsLoop = newLoop(w.Log, "roots", settleAcks, 10*time.Second, w.keepRoots)
	w.locksLoop = newLoop(w.Log, "locks", settleAcks, locks.Every, w.keepOperatorLocks)
	w.failoverLoop = newLoop(w.Log, "failover", 0, 0, w.keepLocks)
	w.trustLoop = newLoop(w.Log, "trust", time.Second, time.Minute, w.keepTrust)
	w.bundlesLoop = newLoop(w.Log, "bundles", settleEvents, 10*time.Minute, w.keepBundles)
	w.stampLoop = newLoop(w.Log, "stamp", settleEvents, time.Minute, w.keepStamp)
	w.statusLoop = newLoop(w.Log, "status", 200*time.Millisecond, 10*time.Second, w.keepStatus)
	w.nodesLoop = newLoop(w.Log, "nodes", time.Second, 15*time.Second, w.keepNodes)
	w.sharesLoop = newLoop(w.Log, "shares", settleAcks, 10*time.Second, w.keepShares)
	w.trafficLoop = newLoop(w.Log, "traffic", 200*time.Millisecond, 10*time.Second, w.keepTraffic)
	w.sharesLoop.rests = true // every agent's word pokes it, and policies wait for it
	w.push.Changed = func() {
		for _, l := range []*loop{w.rootsLoop, w.failoverLoop, w.statusLoop, w.nodesLoop, w.sharesLoop, w.trafficLoop} {
			l.poke()
		}
	}
	w.push.Counted = w.trafficLoop.poke
	w.sweeper.Changed = w.statusLoop.poke
	w.roots.Written, w.roots.Asked = w.policiesLoop.poke, w.locksLoop.poke
	w.weigher.Changed = w.rootsLoop.poke

	for _, o := range []client.Object{
		&v1alpha1.ShardingConfig{}, &v1alpha1.CircuitBreaker{}, &v1alpha1.FaultInjection{}, &corev1.Pod{}, &corev1.Service{}, &discoveryv1.EndpointSlice{},
		metadataOf(namespaceKind), metadataOf(nodeKind),
	} {
		informer, err := w.cache.GetInformer(ctx, o, cache.BlockUntilSynced(false))
		if err != nil {
			return fmt.Errorf("watching %T: %w", o, err)
		}
		if _, err := informer.AddEventHandler(wake(w.policiesLoop)); err != nil { // which wakes that of roots
			return err
		}
	}
	for _, r := range []manager.Runnable{
		w.policiesLoop,
		w.rootsLoop,
		w.locksLoop,
		w.failoverLoop,
		w.trustLoop,
		w.bundlesLoop,
		w.stampLoop,
		w.statusLoop,
		w.nodesLoop,
		w.sharesLoop,
		w.trafficLoop,
		leader(w.watchBundles),
		leader(w.sweeper.Run),
		leader(w.weigher.Run),
		leader(w.serveAgents),
		newLoop(w.Log, "endpoint", 0, 15*time.Second, w.keepEndpoint),
		follower(w.follow),
		follower(w.watchPlatform),
	} {
		if err := mgr.Add(r); err != nil {
			return err
		}
	}
	return nil
}

// wake pokes a loop for every event that changes an object's meaning: writes of
// a status, the manager's own among them, are none.
func wake(l *loop) toolscache.ResourceEventHandler {
	return toolscache.ResourceEventHandlerFuncs{
		AddFunc:    func(any) { l.poke() },
		DeleteFunc: func(any) { l.poke() },
		UpdateFunc: func(before, after any) {
			if !sameMeaning(before, after) {
				l.poke()
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
		cluster = w.cluster.Load()
		w.Log.Warn("the apiserver's addresses are not known, the last ones stay", "error", err)
	} else if w.cluster.Swap(cluster).GetVersion() != cluster.Version {
		w.trustLoop.poke()
	}

	l, listErr := w.list(ctx)
	if listErr != nil {
		return listErr
	}
	w.listed.Store(l)
	w.rootsLoop.poke()
	known, ok := w.roots.Known(l.configs, l.namespaces)
	if !ok || !w.withHandWritten(known, l.configs) {
		// Agents keep what they were told last, until it is known who holds what.
		return err
	}
	if openErr := w.openBook(ctx, l.rules.Breakers); openErr != nil {
		return openErr
	}
	w.sharing.Lock()
	c := &compiled{compile.Compile(l.configs, l.pods, known, l.rules), l}
	w.push.Set(cluster, c.Policies)
	before := w.compiled.Swap(c)
	w.sharing.Unlock()
	until := c.Until
	if again := time.Now().Add(sharesPatience); !w.unread.IsZero() && (until.IsZero() || again.Before(until)) {
		until = again
	}
	w.wakeAt(until)
	w.statusLoop.poke()
	w.sharesLoop.poke()
	w.trafficLoop.poke()
	// The other loops read the apiserver, so not at every pod's every step.
	if before == nil || !maps.Equal(bundleNeeds(before.pods, before.configs), bundleNeeds(c.pods, c.configs)) {
		w.bundlesLoop.poke()
	}
	if before == nil || !slices.EqualFunc(before.configs, c.configs, sameSpec) {
		w.stampLoop.poke()
	}

	metrics.Members.Reset()
	for _, s := range c.Shards {
		metrics.Members.WithLabelValues(s.Namespace, s.Name).Set(float64(len(s.Members)))
	}
	return err
}

// wakeAt lets the policies loop look again, as when the next FaultInjection expires:
// agents do not wait for that.
func (w *world) wakeAt(t time.Time) {
	if w.later != nil {
		w.later.Stop()
	}
	if !t.IsZero() {
		w.later = time.AfterFunc(time.Until(t), w.policiesLoop.poke)
	}
}

// keepLocks frees locks of the dead.
func (w *world) keepLocks(ctx context.Context) error {
	c := w.compiled.Load()
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

func (w *world) list(ctx context.Context) (*listed, error) {
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
	out := &listed{rules: compile.Rules{Cache: &w.rendered, Now: time.Now(), Share: w.book.Share, RequestTimeout: w.requestTimeout()}}
	for i := range breakers.Items {
		out.rules.Breakers = append(out.rules.Breakers, &breakers.Items[i])
	}
	for i := range injections.Items {
		out.rules.Injections = append(out.rules.Injections, &injections.Items[i])
	}
	for i := range configs.Items {
		out.configs = append(out.configs, &configs.Items[i])
	}
	// A cache lists in no order.
	slices.SortFunc(out.configs, func(a, b *v1alpha1.ShardingConfig) int { return strings.Compare(string(a.UID), string(b.UID)) })
	for i := range pods.Items {
		out.pods = append(out.pods, &pods.Items[i])
	}
	for _, n := range namespaces.Items {
		out.namespaces = append(out.namespaces, n.Name)
		if compile.ForbidsFaults(&n) {
			out.rules.NoFaults = append(out.rules.NoFaults, n.Name)
		}
	}
	slices.Sort(out.namespaces)
	return out, nil
}

// requestTimeout is the apiserver's --request-timeout.
func (w *world) requestTimeout() time.Duration {
	return w.settings.Load().APIServer.RequestTimeout.Duration
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
	if c := w.cluster.Load(); c != nil {
		addresses = apiserver.Addresses(c)
	}
	return trust.APIServerNames(w.ClusterDomain, addresses...)
}
