package manager

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/go-logr/logr"
	"golang.org/x/time/rate"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/apiserver"
	"github.com/ctrlmesh/ctrlmesh/manager/failover"
	"github.com/ctrlmesh/ctrlmesh/manager/inject"
	"github.com/ctrlmesh/ctrlmesh/manager/label"
	"github.com/ctrlmesh/ctrlmesh/manager/locks"
	"github.com/ctrlmesh/ctrlmesh/manager/push"
	"github.com/ctrlmesh/ctrlmesh/manager/roots"
	"github.com/ctrlmesh/ctrlmesh/manager/trust"
)

// weighRate is how many requests a second are made to weigh, for all roots and resources.
const weighRate = 100

// LeaseName is the name of the leader's Lease.
const LeaseName = "ctrlmesh-manager"

// Run runs a replica of the manager until the context ends.
func Run(ctx context.Context, o Options) error {
	if err := o.validate(); err != nil {
		return err
	}
	ctrl.SetLogger(logr.FromSlogHandler(o.Log.Handler()))
	scheme := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), v1alpha1.AddToScheme(scheme)); err != nil {
		return err
	}
	config := rest.CopyConfig(o.Config)
	config.UserAgent = "ctrlmesh-manager"
	// The apiserver's priority and fairness is the judge; our own queue would
	// only put admission behind the loops.
	config.QPS = -1
	live, err := client.New(config, client.Options{Scheme: scheme})
	if err != nil {
		return err
	}
	kube, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	self, err := whoami(ctx, kube)
	if err != nil {
		return err
	}
	meta, err := metadata.NewForConfig(config)
	if err != nil {
		return err
	}

	w := &world{
		Options: o,
		live:    live,
		kube:    kube,
		serving: &trust.Serving{
			Client: live, Namespace: o.Namespace,
			Names: trust.ManagerNames(o.Namespace, o.ClusterDomain, o.ManagerService, o.WebhookService),
		},
	}
	w.authority = &trust.Authority{Client: live, Namespace: o.Namespace, Names: w.apiServerNames, Log: o.Log}
	w.egress = &trust.Authority{Client: live, Namespace: o.Namespace, Names: w.apiServerNames, Egress: true, Log: o.Log}
	if err := w.bootstrap(ctx); err != nil {
		return err
	}
	w.bundles = &inject.Bundles{
		Client: live, Mesh: w.authority.Bundle, Cluster: w.clusterCA, Egress: w.egress.Bundle, Reload: w.loadCAs,
	}

	grace := 5 * time.Second
	mgr, err := manager.New(config, manager.Options{
		Scheme: scheme,
		Cache:  cacheOptions(o.Namespace),
		// What is not watched on purpose is never cached by accident.
		NewClient:                     func(*rest.Config, client.Options) (client.Client, error) { return live, nil },
		Logger:                        logr.FromSlogHandler(o.Log.Handler()),
		LeaderElection:                true,
		LeaderElectionID:              LeaseName,
		LeaderElectionNamespace:       o.Namespace,
		LeaderElectionReleaseOnCancel: true,                                    // main ends when Run does
		Metrics:                       metricsserver.Options{BindAddress: "0"}, // served within bounds below
		GracefulShutdownTimeout:       &grace,
	})
	if err != nil {
		return err
	}
	w.cache = mgr.GetCache()
	w.recorder = mgr.GetEventRecorder("ctrlmesh-manager")
	w.elected = mgr.Elected()

	if err := w.serveHTTP(ctx, mgr, w.webhooks(self), grace); err != nil {
		return err
	}

	w.push = &push.Server{
		Auth: &push.Authenticator{
			Reviewer: kube.AuthenticationV1().TokenReviews(),
			User:     fmt.Sprintf("system:serviceaccount:%s:%s", o.Namespace, o.AgentServiceAccount),
		},
		Signer: w.authority, EgressSigner: w.egress,
		Log: o.Log,
	}
	w.sweeper = &label.Sweeper{
		Metadata: meta,
		Served:   kube.Discovery().ServerPreferredResources,
		Limiter:  rate.NewLimiter(rate.Limit(o.StampRate), o.StampBurst),
		Skip:     o.Namespace,
		Settings: w.Settings.Load,
		Every:    o.StampEvery,
		Log:      o.Log,
	}
	w.weigher = &roots.Weigher{
		Metadata: meta,
		Served:   kube.Discovery().ServerPreferredResources,
		Limiter:  rate.NewLimiter(weighRate, weighRate),
		Log:      o.Log,
	}
	w.locks = &locks.Keeper{Client: live, May: w.mayUpdate, Log: o.Log}
	w.roots = &roots.Roots{Client: live, Locks: w.locks.State, Observe: w.push.Observe, Stamping: w.sweeper.Status, Recorder: w.recorder, Weigher: w.weigher, Log: o.Log}
	w.failover = &failover.Failover{Client: live, Observe: w.push.Observe, Recorder: w.recorder, Log: o.Log}
	if err := w.add(ctx, mgr); err != nil {
		return err
	}
	if err := mgr.Start(ctx); err != nil {
		return err
	}
	o.Log.Info("stopped")
	return nil
}

// whoami is the name of the user that the manager is to the apiserver.
func whoami(ctx context.Context, kube kubernetes.Interface) (string, error) {
	review, err := kube.AuthenticationV1().SelfSubjectReviews().Create(ctx, &authenticationv1.SelfSubjectReview{}, metav1.CreateOptions{})
	if err != nil {
		return "", fmt.Errorf("asking the apiserver for the manager's own name: %w", err)
	}
	return review.Status.UserInfo.Username, nil
}

// cacheOptions restrict what is watched to what the mesh is about.
func cacheOptions(namespace string) cache.Options {
	named := func(name string) cache.Config {
		return cache.Config{FieldSelector: fields.OneTermEqualSelector("metadata.name", name)}
	}
	return cache.Options{
		ReaderFailOnMissingInformer: true,
		DefaultTransform:            cache.TransformStripManagedFields(),
		ByObject: map[client.Object]cache.ByObject{
			&corev1.Pod{}: {
				Label:     labels.SelectorFromSet(labels.Set{v1alpha1.EnableProxyLabel: "true"}),
				Transform: slimPod,
			},
			&corev1.Service{}: {
				Namespaces: map[string]cache.Config{apiserver.Namespace: named(apiserver.Name), namespace: named(apiserver.AgentService)},
			},
			&discoveryv1.EndpointSlice{}: {
				Namespaces: map[string]cache.Config{apiserver.Namespace: {}},
				Label:      labels.SelectorFromSet(labels.Set{discoveryv1.LabelServiceName: apiserver.Name}),
			},
			&v1alpha1.ShardingConfig{}: {},
			&v1alpha1.CircuitBreaker{}: {},
			&v1alpha1.FaultInjection{}: {},
			metadataOf(namespaceKind):  {Transform: slimMetadata},
			metadataOf(nodeKind):       {Transform: slimMetadata},
		},
	}
}

// slimPod keeps of a pod what the manager looks at.
func slimPod(o any) (any, error) {
	pod, ok := o.(*corev1.Pod)
	if !ok {
		return o, nil
	}
	slim := &corev1.Pod{ObjectMeta: pod.ObjectMeta}
	slim.ManagedFields = nil
	slim.Annotations = nil
	for _, key := range []string{v1alpha1.TrustAnnotation, v1alpha1.CaptureAnnotation, v1alpha1.TrustEgressAnnotation, v1alpha1.EgressTrustAnnotation} {
		if v, ok := pod.Annotations[key]; ok {
			metav1.SetMetaDataAnnotation(&slim.ObjectMeta, key, v)
		}
	}
	slim.Spec.NodeName, slim.Spec.ServiceAccountName = pod.Spec.NodeName, pod.Spec.ServiceAccountName
	slim.Status.Phase, slim.Status.PodIP = pod.Status.Phase, pod.Status.PodIP
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodReady {
			slim.Status.Conditions = []corev1.PodCondition{{Type: c.Type, Status: c.Status}}
		}
	}
	return slim, nil
}
