package manager

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"net/http"
	"strconv"

	"github.com/prometheus/client_golang/prometheus/promhttp"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/metrics"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	"github.com/ctrlmesh/ctrlmesh/manager/admit"
	"github.com/ctrlmesh/ctrlmesh/manager/dialect/serve"
	"github.com/ctrlmesh/ctrlmesh/manager/inject"
	"github.com/ctrlmesh/ctrlmesh/manager/label"
	"github.com/ctrlmesh/ctrlmesh/manager/validate"
)

// nowhere is the address of a port that is not served.
const nowhere = "0"

// serveHTTP serves webhooks, metrics and health, all of them in every replica.
func (r *replica) serveHTTP(ctx context.Context, mgr manager.Manager) error {
	reviews, err := r.reviews(r.webhooks(mgr.GetCache()))
	if err != nil {
		return err
	}
	config, err := r.webhookTLS()
	if err != nil {
		return err
	}
	scrapes := http.NewServeMux()
	scrapes.Handle("/metrics", admit.Scrapes(promhttp.HandlerFor(metrics.Registry, promhttp.HandlerOpts{ErrorHandling: promhttp.HTTPErrorOnError})))
	for _, s := range []struct {
		port    admit.Port
		address string
		handler http.Handler
		tls     *tls.Config
	}{
		{admit.Webhooks, net.JoinHostPort("", strconv.Itoa(r.Webhooks.Port)), reviews, config},
		{admit.Metrics, r.MetricsAddress, scrapes, nil},
		{admit.Health, r.HealthAddress, r.health(), nil},
	} {
		if s.address == nowhere {
			continue
		}
		l, err := s.port.Listen(ctx, s.address)
		if err != nil {
			return fmt.Errorf("listening for %s: %w", s.port.Name, err)
		}
		if s.tls != nil {
			l = tls.NewListener(l, s.tls)
		}
		if err := mgr.Add(&manager.Server{Name: s.port.Name, Server: s.port.Server(s.handler, r.Log), Listener: l, ShutdownTimeout: new(shutdownTimeout)}); err != nil {
			return err
		}
	}
	return nil
}

// webhookTLS presents the manager's certificate, and asks for the client's if clients
// are configured to have one.
func (r *replica) webhookTLS() (*tls.Config, error) {
	config := r.certificates.Serving.TLSConfig()
	config.NextProtos = []string{"h2", "http/1.1"}
	if r.Webhooks.ClientCA == "" {
		return config, nil
	}
	clients := &admit.Clients{CAFile: r.Webhooks.ClientCA, Names: r.Webhooks.ClientNames, Log: r.Log}
	if err := clients.Configure(config); err != nil {
		return nil, err
	}
	return config, nil
}

// webhooks are the handlers of admission by path.
func (r *replica) webhooks(cached client.Reader) map[string]admission.Handler {
	reader := admissionReader{admit.NewReader(r.live), cached}
	out := map[string]admission.Handler{
		inject.Path:             &inject.Webhook{Reader: reader, Bundles: r.bundles, Namespace: r.Namespace, Permits: r.certificates.Permits, Hosts: r.additionalHosts},
		validate.Path:           &validate.Webhook{Reader: reader, Manager: r.self, Namespace: r.Namespace, Settings: r.state.Settings.Load, Unknown: r.resources.UnknownNow, Translate: serve.Decode},
		validate.BreakersPath:   &validate.Breakers{Reader: reader},
		validate.InjectionsPath: &validate.Injections{Reader: reader},
		label.Path:              admission.HandlerFunc(label.Stamp),
	}
	if r.Dialects {
		out[serve.PolicyPath] = serve.PolicyWebhook{Reader: reader}
	}
	return out
}

// ready is a readiness check: it fails while requests cannot be served.
func (r *replica) ready(*http.Request) error { return r.certificates.Ready() }

// reviews serves the handlers, within bounds that they share.
func (r *replica) reviews(webhooks map[string]admission.Handler) (http.Handler, error) {
	mux := http.NewServeMux()
	for path, handler := range webhooks {
		h, err := admission.StandaloneWebhook(&admission.Webhook{Handler: admit.WithNamespace(handler)}, admission.StandaloneOptions{MetricsPath: path})
		if err != nil {
			return nil, fmt.Errorf("making webhook %s: %w", path, err)
		}
		mux.Handle(path, h)
	}
	return admit.NewReviews(mux, r.Log), nil
}

// health answers the kubelet's probes.
func (r *replica) health() http.Handler {
	mux := http.NewServeMux()
	for path, checks := range map[string]map[string]healthz.Checker{
		"/healthz": {"ping": healthz.Ping},
		"/readyz":  {"certificates": r.ready},
	} {
		handler := http.StripPrefix(path, &healthz.Handler{Checks: checks})
		mux.Handle(path, handler)
		mux.Handle(path+"/", handler)
	}
	return mux
}

// admissionReader is what admission reads with. A ShardingConfig that was created a
// moment ago counts, so that those are read from the apiserver, at a limited rate. Pods
// are read from the cache.
type admissionReader struct {
	client.Reader
	cached client.Reader
}

// List implements client.Reader.
func (r admissionReader) List(ctx context.Context, list client.ObjectList, opts ...client.ListOption) error {
	if _, ok := list.(*corev1.PodList); ok {
		return r.cached.List(ctx, list, opts...)
	}
	return r.Reader.List(ctx, list, opts...)
}

// Get implements client.Reader.
func (r admissionReader) Get(ctx context.Context, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
	if _, ok := o.(*corev1.Service); ok {
		return r.cached.Get(ctx, key, o, opts...)
	}
	return r.Reader.Get(ctx, key, o, opts...)
}
