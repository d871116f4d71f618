package manager

import (
	"context"
	"fmt"
	"net"
	"time"

	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"
	toolscache "k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/manager"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/controllers"
	"github.com/ctrlmesh/ctrlmesh/manager/controllers/address"
	"github.com/ctrlmesh/ctrlmesh/manager/controllers/bundle"
	"github.com/ctrlmesh/ctrlmesh/manager/controllers/endpoint"
	"github.com/ctrlmesh/ctrlmesh/manager/controllers/entry"
	"github.com/ctrlmesh/ctrlmesh/manager/controllers/failover"
	"github.com/ctrlmesh/ctrlmesh/manager/controllers/grant"
	"github.com/ctrlmesh/ctrlmesh/manager/controllers/lock"
	"github.com/ctrlmesh/ctrlmesh/manager/controllers/node"
	"github.com/ctrlmesh/ctrlmesh/manager/controllers/policy"
	"github.com/ctrlmesh/ctrlmesh/manager/controllers/root"
	"github.com/ctrlmesh/ctrlmesh/manager/controllers/share"
	"github.com/ctrlmesh/ctrlmesh/manager/controllers/stamp"
	"github.com/ctrlmesh/ctrlmesh/manager/controllers/status"
	"github.com/ctrlmesh/ctrlmesh/manager/controllers/traffic"
	"github.com/ctrlmesh/ctrlmesh/manager/controllers/usage"
	"github.com/ctrlmesh/ctrlmesh/manager/controllers/webhook"
	"github.com/ctrlmesh/ctrlmesh/manager/dialect/serve"
	"github.com/ctrlmesh/ctrlmesh/manager/label"
	"github.com/ctrlmesh/ctrlmesh/manager/locks"
	"github.com/ctrlmesh/ctrlmesh/manager/push"
	"github.com/ctrlmesh/ctrlmesh/manager/query"
	"github.com/ctrlmesh/ctrlmesh/manager/roots"
	"github.com/ctrlmesh/ctrlmesh/manager/weigh"
)

// weighRate is how many requests a second are made to weigh, for all roots and resources.
const weighRate = 100

// leader is what only the leader runs.
type leader struct {
	replica      *replica
	cache        cache.Cache
	reader       client.Reader // reads the cache
	recorder     events.EventRecorder
	push         *push.Server
	sweeper      *label.Sweeper
	weigher      *weigh.Weigher
	evaluator    *query.Evaluator
	keeper       *locks.Keeper
	roots        *roots.Roots
	bundleWriter *bundle.Controller
}

func newLeader(r *replica, from cache.Cache, recorder events.EventRecorder) *leader {
	l := &leader{replica: r, cache: from, reader: r.reader(from), recorder: recorder}
	changed := &r.state.Changed
	l.push = &push.Server{
		Auth: &push.Authenticator{
			Reviewer: r.kube.AuthenticationV1().TokenReviews(),
			User:     fmt.Sprintf("system:serviceaccount:%s:%s", r.Namespace, r.AgentServiceAccount),
		},
		Signer: r.certificates.Mesh, EgressSigner: r.certificates.Egress,
		Changed: changed.Agents.Notify, Counted: changed.Counts.Notify,
		Log: r.Log,
	}
	l.sweeper = &label.Sweeper{
		Metadata: r.metadata,
		Served:   r.kube.Discovery().ServerPreferredResources,
		Limiter:  rate.NewLimiter(rate.Limit(r.Stamps.Rate), r.Stamps.Burst),
		Skip:     r.Namespace,
		Settings: r.state.Settings.Load,
		Every:    r.Stamps.Every,
		Changed:  changed.Stamping.Notify,
		Log:      r.Log,
	}
	l.weigher = &weigh.Weigher{
		Metadata: r.metadata,
		Served:   r.kube.Discovery().ServerPreferredResources,
		Limiter:  rate.NewLimiter(weighRate, weighRate),
		Changed:  changed.Weights.Notify,
		Log:      r.Log,
	}
	prometheus := &query.Prometheus{URL: r.Prometheus.URL, TokenFile: r.Prometheus.TokenFile, CAFile: r.Prometheus.CAFile}
	l.evaluator = &query.Evaluator{Evaluate: prometheus.Evaluate, Changed: changed.Answers.Notify, Log: r.Log}
	l.keeper = &locks.Keeper{Client: r.live, May: lock.Reviewer{Kube: r.kube}.MayUpdate, Log: r.Log, Now: time.Now}
	l.roots = &roots.Roots{
		Client: r.live, Account: types.NamespacedName{Namespace: r.Namespace, Name: account}, Locks: l.keeper, Observe: l.push.Observe, Others: roots.Others{Stamping: l.sweeper.Status, MissingBundle: r.state.MissingBundle, Entry: r.state.Entry}, Recorder: recorder, Weigher: l.weigher, Queries: l.evaluator,
		Written: changed.Roots.Notify, Asked: changed.Demands.Notify,
		Log: r.Log, Now: time.Now,
	}
	l.bundleWriter = &bundle.Controller{
		Kube: r.kube, Bundles: r.bundles, Mesh: r.certificates.Mesh.Bundle, Egress: r.certificates.Egress.Bundle, State: r.state,
	}
	return l
}

// controllers returns all controllers.
func (l *leader) controllers() []controllers.Reconciler {
	s := l.replica.state
	service := types.NamespacedName{Namespace: l.replica.Namespace, Name: l.replica.Webhooks.Service}
	namespaces := &label.Namespaces{Client: l.replica.live, Cache: l.reader, Limiter: l.sweeper.Limiter}
	out := []controllers.Reconciler{
		&policy.Controller{
			Client: l.replica.live, Cache: l.reader, Pods: l.pods, Namespace: l.replica.Namespace, ClusterCA: l.replica.clusterCA, MeshCA: l.replica.certificates.Mesh.Bundle,
			Roots: l.roots, Keeper: l.keeper, Resources: l.replica.resources, Push: l.push, State: s, Dialects: l.replica.Dialects, Log: l.replica.Log,
		},
		&address.Controller{Lookup: net.DefaultResolver.LookupNetIP, Now: time.Now, State: s},
		&root.Controller{Cache: l.reader, Roots: l.roots, Push: l.push, State: s},
		&lock.Controller{Keeper: l.keeper, Roots: l.roots, Push: l.push, State: s, Log: l.replica.Log},
		&grant.Controller{Client: l.replica.live, May: lock.Reviewer{Kube: l.replica.kube}.MayLead, State: s, Log: l.replica.Log},
		&failover.Controller{Client: l.replica.live, Exits: l.push.Exits, Observe: l.push.Observe, Recorder: l.recorder, State: s, Log: l.replica.Log},
		l.replica.certificates,
		l.bundleWriter,
		&stamp.Controller{
			Client: l.replica.live, Service: service, CA: l.replica.certificates.Serving.Bundle,
			Namespaces: namespaces,
			State:      s, Sweeper: l.sweeper, Now: time.Now,
		},
		&status.Controller{Client: l.replica.live, Cache: l.reader, Recorder: l.recorder, Keeper: l.keeper, Sweeper: l.sweeper, Push: l.push, State: s},
		&node.Controller{Client: l.replica.live, Namespace: l.replica.Namespace, Push: l.push, State: s},
		&share.Controller{Push: l.push, State: s},
		&usage.Controller{Client: l.replica.live, Observe: l.push.Observe, State: s, Log: l.replica.Log, Now: time.Now},
		&webhook.Controller{Client: l.replica.live, Push: l.push, State: s},
		&traffic.Controller{Client: l.replica.live, Cache: l.reader, Recorder: l.recorder, Push: l.push, State: s},
		&endpoint.Controller{
			Client: l.replica.live, Namespace: l.replica.Namespace, Service: l.replica.ManagerService, PodName: l.replica.PodName, PodIP: l.replica.PodIP, Address: l.replica.PushAddress,
		},
	}
	if l.replica.Dialects {
		out = append(out, &entry.Controller{
			Client: l.replica.live, Service: service, CA: l.replica.certificates.Serving.Bundle, State: s, Namespaces: namespaces, Now: time.Now,
		})
	}
	return out
}

// pods returns the labelled pods. They are the cache's: copies of very many pods, which a list of
// structs has, are much of the manager's memory.
func (l *leader) pods(ctx context.Context) ([]*corev1.Pod, error) {
	informer, err := l.cache.GetInformer(ctx, &corev1.Pod{})
	if err != nil {
		return nil, fmt.Errorf("listing pods: %w", err)
	}
	shared, ok := informer.(toolscache.SharedIndexInformer)
	if !ok {
		return nil, fmt.Errorf("listing pods: %T has no store", informer)
	}
	stored := shared.GetStore().List()
	pods := make([]*corev1.Pod, 0, len(stored))
	for _, o := range stored {
		if p, ok := o.(*corev1.Pod); ok {
			pods = append(pods, p)
		}
	}
	return pods, nil
}

// add adds all runnables, and lets events trigger the policies.
func (l *leader) add(ctx context.Context, mgr manager.Manager) error {
	for _, c := range l.controllers() {
		if err := mgr.Add(controllers.New(l.replica.Log, c.Spec())); err != nil {
			return err
		}
	}
	watched := []client.Object{
		&v1alpha1.ShardingConfig{}, &v1alpha1.CircuitBreaker{}, &v1alpha1.FaultInjection{}, &corev1.Pod{}, &corev1.Service{}, &discoveryv1.EndpointSlice{},
		controllers.MetadataOf(controllers.NamespaceKind), controllers.MetadataOf(controllers.NodeKind),
	}
	if l.replica.Dialects {
		watched = append(watched, serve.Objects()...)
	}
	for _, o := range watched {
		informer, err := l.cache.GetInformer(ctx, o, cache.BlockUntilSynced(false))
		if err != nil {
			return fmt.Errorf("watching %T: %w", o, err)
		}
		if _, err := informer.AddEventHandler(policy.OnChange(l.replica.state.Changed.Objects.Notify)); err != nil {
			return err
		}
	}
	follow := func(ctx context.Context) error { return l.replica.certificates.Follow(ctx, mgr.Elected()) }
	for _, r := range []manager.Runnable{
		manager.RunnableFunc(l.bundleWriter.Watch), // a RunnableFunc runs in the leader
		manager.RunnableFunc(l.sweeper.Run),
		manager.RunnableFunc(l.weigher.Run),
		manager.RunnableFunc(l.evaluator.Run),
		manager.RunnableFunc(l.serveAgents),
		everyReplica(follow),
		everyReplica(l.replica.settings.Watch),
		everyReplica(l.replica.resources.Run),
	} {
		if err := mgr.Add(r); err != nil {
			return err
		}
	}
	return nil
}

// everyReplica is a Runnable of all replicas.
type everyReplica func(context.Context) error

// Start implements manager.Runnable.
func (f everyReplica) Start(ctx context.Context) error { return f(ctx) }

// NeedLeaderElection implements manager.LeaderElectionRunnable.
func (everyReplica) NeedLeaderElection() bool { return false }

// serveAgents serves the agents' streams.
func (l *leader) serveAgents(ctx context.Context) error {
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", l.replica.PushAddress)
	if err != nil {
		return err
	}
	l.replica.Log.Info("leading: serving agents", "address", listener.Addr().String())
	return l.push.Serve(ctx, listener, l.replica.certificates.Serving.TLSConfig())
}
