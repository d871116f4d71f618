package manager

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/client-go/rest"

	"github.com/ctrlmesh/ctrlmesh/manager/apiserver"
	"github.com/ctrlmesh/ctrlmesh/manager/query"
)

// Options of the manager.
type Options struct {
	// Config is the connection to the apiserver.
	Config *rest.Config
	Log    *slog.Logger

	// Namespace of the mesh.
	Namespace string
	// PodName and PodIP are those of this replica. Agents connect to the leader at PodIP.
	PodName, PodIP string
	// ClusterDomain is the DNS domain of the cluster.
	ClusterDomain string
	// AgentServiceAccount is the name of the agents' ServiceAccount.
	AgentServiceAccount string
	// ManagerService is the Service without selector through which agents find
	// the leader.
	ManagerService string

	// PushAddress, MetricsAddress and HealthAddress are listened on.
	PushAddress, MetricsAddress, HealthAddress string

	Webhooks WebhookOptions
	Stamps   StampOptions
	// Prometheus evaluates the queries of rollouts' analyses.
	Prometheus PrometheusOptions
	// Dialects makes the manager serve the custom resources of the mesh's ancestors, whose
	// definitions must be installed.
	Dialects bool
}

// WebhookOptions are how the apiserver reaches the webhooks.
type WebhookOptions struct {
	Service string
	// Configuration is the name of the Mutating- and of the
	// ValidatingWebhookConfiguration that verify the manager by its CA.
	Configuration string
	Port          int
	// ClientCA is a file with the CAs of the apiserver's client certificate for
	// webhooks; empty if it presents none. ClientNames are the common names that
	// it may have; empty for any.
	ClientCA    string
	ClientNames []string
}

// StampOptions bound how fast existing objects are labelled.
type StampOptions struct {
	// Rate is in objects per second.
	Rate  float64
	Burst int
	// Every is the time between searches for objects without labels.
	Every time.Duration
}

// PrometheusOptions are how the manager reaches a Prometheus.
type PrometheusOptions struct {
	// URL is empty if there is none.
	URL string
	// TokenFile has the bearer token of requests, and CAFile the CAs that verify the server; empty
	// for none, and for those of the system.
	TokenFile, CAFile string
}

// AddFlags adds flags for all options that are not discovered. getenv returns defaults.
func (o *Options) AddFlags(fs *pflag.FlagSet, getenv func(string) string) {
	fs.StringVar(&o.Namespace, "namespace", getenv("POD_NAMESPACE"), "namespace of the mesh (default $POD_NAMESPACE)")
	fs.StringVar(&o.PodName, "pod-name", getenv("POD_NAME"), "name of this pod (default $POD_NAME)")
	fs.StringVar(&o.PodIP, "pod-ip", getenv("POD_IP"), "address at which agents reach this replica while it leads (default $POD_IP)")
	fs.StringVar(&o.ClusterDomain, "cluster-domain", "cluster.local", "DNS domain of the cluster")
	fs.StringVar(&o.AgentServiceAccount, "agent-service-account", "ctrlmesh-agent", "ServiceAccount of the agents")
	fs.StringVar(&o.ManagerService, "manager-service", "ctrlmesh-manager", "Service, without selector, through which agents find the leader")
	fs.StringVar(&o.Webhooks.Service, "webhook-service", "ctrlmesh-webhook", "Service of the webhooks")
	fs.StringVar(&o.Webhooks.Configuration, "webhook-configuration", "ctrlmesh", "name of the Mutating- and of the ValidatingWebhookConfiguration to keep the CA of")
	fs.StringVar(&o.PushAddress, "push-address", ":8443", "where agents are served")
	fs.IntVar(&o.Webhooks.Port, "webhook-port", 9443, "port of the webhooks")
	fs.StringVar(&o.MetricsAddress, "metrics-address", ":8080", "where metrics are served; 0 for nowhere")
	fs.StringVar(&o.HealthAddress, "health-address", ":8081", "where /healthz and /readyz are served; 0 for nowhere")
	fs.StringVar(&o.Webhooks.ClientCA, "webhook-client-ca", "", "file with the CAs, in PEM, of the certificate that the apiserver presents to webhooks; requests without one are refused then (default: none is asked for)")
	fs.StringSliceVar(&o.Webhooks.ClientNames, "webhook-client-names", nil, "common names, separated by commas, of which the apiserver's certificate has one (default: any)")
	fs.StringVar(&o.Prometheus.URL, "analysis-prometheus-url", "", "URL of the Prometheus that evaluates the queries of spec.root.rollout.analysis (default: there is none, and rollouts with queries wait)")
	fs.StringVar(&o.Prometheus.TokenFile, "analysis-prometheus-token-file", "", "file with the bearer token for that Prometheus (default: none is sent)")
	fs.StringVar(&o.Prometheus.CAFile, "analysis-prometheus-ca-file", "", "file with the CAs, in PEM, of that Prometheus (default: those of the system)")
	fs.BoolVar(&o.Dialects, "dialects", true, "serve the custom resources of the mesh's ancestors; their definitions must be installed")
	fs.Float64Var(&o.Stamps.Rate, "stamp-rate", 200, "existing objects labelled per second at most")
	fs.IntVar(&o.Stamps.Burst, "stamp-burst", 400, "existing objects labelled at once at most")
	fs.DurationVar(&o.Stamps.Every, "stamp-every", 10*time.Minute, "time between searches for objects without labels")
}

func (o *Options) validate() error {
	if o.Namespace == "" {
		return errors.New("no namespace: set --namespace or POD_NAMESPACE")
	}
	if o.Namespace == apiserver.Namespace {
		// The cache watches only the apiserver's Service there.
		return fmt.Errorf("the namespace %s, which is the apiserver's, cannot be the mesh's: install it in one of its own", o.Namespace)
	}
	if _, err := netip.ParseAddr(o.PodIP); err != nil {
		return errors.New("no address for agents: set --pod-ip or POD_IP")
	}
	if len(o.Webhooks.ClientNames) > 0 && o.Webhooks.ClientCA == "" {
		return errors.New("--webhook-client-names needs --webhook-client-ca")
	}
	if err := query.ValidURL(o.Prometheus.URL); err != nil {
		return fmt.Errorf("--analysis-prometheus-url: %w", err)
	}
	if o.Prometheus.URL == "" && (o.Prometheus.TokenFile != "" || o.Prometheus.CAFile != "") {
		return errors.New("--analysis-prometheus-token-file and --analysis-prometheus-ca-file need --analysis-prometheus-url")
	}
	if o.Stamps.Rate <= 0 || o.Stamps.Burst < 1 || o.Stamps.Every <= 0 {
		return errors.New("--stamp-rate, --stamp-burst and --stamp-every must be positive")
	}
	return nil
}

// clusterCA returns the current CA that verifies the real apiserver.
func (o *Options) clusterCA() []byte {
	if len(o.Config.CAData) > 0 {
		return o.Config.CAData
	}
	ca, err := os.ReadFile(o.Config.CAFile)
	if err != nil {
		o.Log.Error("reading the cluster's CA", "error", err)
		return nil
	}
	return ca
}
