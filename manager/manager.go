package manager

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/go-logr/logr"
	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/apiserver"
	"github.com/ctrlmesh/ctrlmesh/manager/controllers"
	"github.com/ctrlmesh/ctrlmesh/manager/controllers/certificate"
	"github.com/ctrlmesh/ctrlmesh/manager/controllers/setting"
	"github.com/ctrlmesh/ctrlmesh/manager/dialect/serve"
	"github.com/ctrlmesh/ctrlmesh/manager/inject"
	"github.com/ctrlmesh/ctrlmesh/manager/resources"
	"github.com/ctrlmesh/ctrlmesh/manager/trust"
)

// LeaseName is the name of the leader's Lease.
const LeaseName = "ctrlmesh-manager"

// account is the ServiceAccount of the manager, which admission policies name, too.
const account = "ctrlmesh-manager"

const (
	// shutdownTimeout is how long requests may take once the context has ended.
	shutdownTimeout = 5 * time.Second
	// electionRetry is the time between two renewals of the leader's lease. Other replicas try to take it every 1
	// to 2.2 times as long: with the default of 2 s, up to 4.4 s after a lease of 15 s has expired.
	electionRetry = time.Second
)

// Run runs a replica of the manager until the context ends.
func Run(ctx context.Context, o Options) error {
	if err := o.validate(); err != nil {
		return err
	}
	ctrl.SetLogger(logr.FromSlogHandler(o.Log.Handler()))
	c, err := connect(ctx, o.Config, o.Dialects)
	if err != nil {
		return err
	}
	r := newReplica(o, c)
	if err := r.bootstrap(ctx); err != nil {
		return err
	}
	mgr, err := r.newManager()
	if err != nil {
		return err
	}
	if err := r.serveHTTP(ctx, mgr); err != nil {
		return err
	}
	if err := newLeader(r, mgr.GetCache(), mgr.GetEventRecorder("ctrlmesh-manager")).add(ctx, mgr); err != nil {
		return err
	}
	if err := mgr.Start(ctx); err != nil {
		return err
	}
	o.Log.Info("stopped")
	return nil
}

// clients are those of the apiserver.
type clients struct {
	config *rest.Config
	// live is uncached.
	live     client.Client
	kube     kubernetes.Interface
	metadata metadata.Interface
	// self is the name of the user that the manager is to the apiserver.
	self string
}

func connect(ctx context.Context, config *rest.Config, dialects bool) (c clients, err error) {
	scheme := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), v1alpha1.AddToScheme(scheme), serve.AddToScheme(scheme)); err != nil {
		return c, err
	}
	c.config = rest.CopyConfig(config)
	c.config.UserAgent = "ctrlmesh-manager"
	// The apiserver's priority and fairness decides; our own queue would
	// only put admission behind the controllers.
	c.config.QPS = -1
	// Locks may be Endpoints, which are read every few seconds, and are deprecated.
	c.config.WarningHandlerWithContext = ctrllog.NewKubeAPIWarningLogger(ctrllog.KubeAPIWarningLoggerOptions{Deduplicate: true})
	if c.live, err = client.New(c.config, client.Options{Scheme: scheme}); err != nil {
		return c, err
	}
	c.live = liveClient(c.live, dialects)
	if c.kube, err = kubernetes.NewForConfig(c.config); err != nil {
		return c, err
	}
	if c.metadata, err = metadata.NewForConfig(c.config); err != nil {
		return c, err
	}
	review, err := c.kube.AuthenticationV1().SelfSubjectReviews().Create(ctx, &authenticationv1.SelfSubjectReview{}, metav1.CreateOptions{})
	if err != nil {
		return c, fmt.Errorf("asking the apiserver for the manager's own name: %w", err)
	}
	c.self = review.Status.UserInfo.Username
	return c, nil
}

// liveClient adds objects of the dialects to what a client reads and writes, if they are served.
func liveClient(c client.Client, dialects bool) client.Client {
	if dialects {
		return serve.Client{Client: c}
	}
	return c
}

// replica is what all replicas have, whether they lead or not.
type replica struct {
	Options
	clients
	state        *controllers.State
	settings     *setting.Controller
	certificates *certificate.Controller
	bundles      *inject.Bundles
	resources    *resources.Catalog
}

func newReplica(o Options, c clients) *replica {
	r := &replica{Options: o, clients: c, state: &controllers.State{}}
	authority := func(egress bool) *trust.Authority {
		return &trust.Authority{Client: c.live, Namespace: o.Namespace, Names: r.apiServerNames, Egress: egress, Now: time.Now, Log: o.Log}
	}
	r.settings = &setting.Controller{Client: c.live, Kube: c.kube, Namespace: o.Namespace, State: r.state, Log: o.Log}
	r.certificates = &certificate.Controller{
		Client: c.live, Namespace: o.Namespace, WebhookConfiguration: o.Webhooks.Configuration, State: r.state, Log: o.Log,
		Authorities: &trust.Authorities{Mesh: authority(false), Egress: authority(true), Serving: &trust.Serving{
			Client: c.live, Namespace: o.Namespace,
			Names: trust.ManagerNames(o.Namespace, o.ClusterDomain, o.ManagerService, o.Webhooks.Service), Now: time.Now,
		}},
	}
	r.bundles = &inject.Bundles{
		Client: c.live, Mesh: r.certificates.Mesh.Bundle, Cluster: o.clusterCA, Egress: r.certificates.Egress.Bundle, Reload: r.certificates.Load,
	}
	r.resources = &resources.Catalog{Discover: c.kube.Discovery().ServerGroupsAndResources, Changed: r.state.Changed.Resources.Notify, Log: o.Log}
	return r
}

// reader reads objects of the dialects too, if they are served.
func (r *replica) reader(from client.Reader) client.Reader {
	if r.Dialects {
		return serve.Reader{Reader: from}
	}
	return from
}

// apiServerNames are the names that stand for the apiserver.
func (r *replica) apiServerNames() trust.Names {
	var more trust.Names
	if c := r.state.Cluster.Load(); c != nil {
		more.DNS, more.IPs = apiserver.Hosts(c)
	}
	return trust.APIServerNames(r.ClusterDomain, more)
}

// additionalHosts are by what clients reach the apiserver beside its Service.
func (r *replica) additionalHosts() []string { return r.state.Settings.Load().APIServer.Hosts() }

// bootstrap waits until it knows the apiserver's addresses and the administrator's
// settings and has all CAs, without which nothing can be served.
func (r *replica) bootstrap(ctx context.Context) error {
	backoff := wait.Backoff{Duration: 200 * time.Millisecond, Factor: 2, Jitter: 0.1, Steps: 10, Cap: 10 * time.Second}
	return backoff.DelayFunc().Until(ctx, true, true, func(ctx context.Context) (bool, error) {
		err := r.load(ctx)
		if err != nil {
			r.Log.Warn("cannot start yet", "error", err)
		}
		return err == nil, nil
	})
}

func (r *replica) load(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	if err := r.served(ctx); err != nil {
		return err
	}
	if err := r.settings.Load(ctx); err != nil {
		return err
	}
	// The leader resolves them: certificates are valid for them wherever they lead.
	named := apiserver.Additional{Hosts: r.additionalHosts()}
	cluster, err := apiserver.Read(ctx, r.live, r.Namespace, named, r.clusterCA(), r.certificates.Mesh.Bundle())
	if err != nil {
		return err
	}
	r.state.Cluster.Store(cluster)
	// Maintain, not Load: a damaged one must not keep all replicas from starting.
	return errors.Join(r.certificates.Load(ctx), r.certificates.Serving.Maintain(ctx, nil))
}

// served returns an error if the apiserver does not serve the kinds of the dialects. Then the
// manager could not watch them.
func (r *replica) served(ctx context.Context) error {
	if !r.Dialects {
		return nil
	}
	if err := r.live.List(ctx, &v1alpha1.ShardingConfigList{}, client.Limit(1)); err != nil {
		return fmt.Errorf("%w: install the definitions of the dialects, or set --dialects=false", err)
	}
	return nil
}

func (r *replica) newManager() (manager.Manager, error) {
	grace, retry := shutdownTimeout, electionRetry
	return manager.New(r.config, manager.Options{
		Scheme: r.live.Scheme(),
		Cache:  cacheOptions(r.Namespace, r.Dialects),
		// What is not watched on purpose is never cached by accident.
		NewClient:                     func(*rest.Config, client.Options) (client.Client, error) { return r.live, nil },
		Logger:                        logr.FromSlogHandler(r.Log.Handler()),
		LeaderElection:                true,
		LeaderElectionID:              LeaseName,
		LeaderElectionNamespace:       r.Namespace,
		LeaderElectionReleaseOnCancel: true, // main ends when Run does
		RetryPeriod:                   &retry,
		Metrics:                       metricsserver.Options{BindAddress: "0"}, // served within bounds by serveHTTP
		GracefulShutdownTimeout:       &grace,
	})
}
