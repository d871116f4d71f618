package manager

import (
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"strings"
	"time"

	"k8s.io/client-go/rest"

	"github.com/ctrlmesh/ctrlmesh/manager/apiserver"
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
	// the leader, WebhookService the one of admission.
	ManagerService, WebhookService string
	// WebhookConfiguration is the name of the Mutating- and of the
	// ValidatingWebhookConfiguration that verify the manager by its CA.
	WebhookConfiguration string

	Listen
	Stamp
	// WebhookClientCA is a file with the CAs of the apiserver's client certificate for
	// webhooks; empty if it presents none. WebhookClientNames are the common names that
	// it may have; empty for any.
	WebhookClientCA    string
	WebhookClientNames []string
}

// Listen are the addresses that the manager listens at.
type Listen struct {
	PushAddress    string
	WebhookPort    int
	MetricsAddress string
	HealthAddress  string
}

// Stamp bounds the sweep that labels existing objects.
type Stamp struct {
	// StampRate and StampBurst bound the objects labelled per second.
	StampRate  float64
	StampBurst int
	// StampEvery is the time between searches for objects without labels.
	StampEvery time.Duration
}

// AddFlags adds flags for all options that are not discovered. getenv returns defaults.
func (o *Options) AddFlags(fs *flag.FlagSet, getenv func(string) string) {
	fs.StringVar(&o.Namespace, "namespace", getenv("POD_NAMESPACE"), "namespace of the mesh (default $POD_NAMESPACE)")
	fs.StringVar(&o.PodName, "pod-name", getenv("POD_NAME"), "name of this pod (default $POD_NAME)")
	fs.StringVar(&o.PodIP, "pod-ip", getenv("POD_IP"), "address at which agents reach this replica while it leads (default $POD_IP)")
	fs.StringVar(&o.ClusterDomain, "cluster-domain", "cluster.local", "DNS domain of the cluster")
	fs.StringVar(&o.AgentServiceAccount, "agent-service-account", "ctrlmesh-agent", "ServiceAccount of the agents")
	fs.StringVar(&o.ManagerService, "manager-service", "ctrlmesh-manager", "Service, without selector, through which agents find the leader")
	fs.StringVar(&o.WebhookService, "webhook-service", "ctrlmesh-webhook", "Service of the webhooks")
	fs.StringVar(&o.WebhookConfiguration, "webhook-configuration", "ctrlmesh", "name of the Mutating- and of the ValidatingWebhookConfiguration to keep the CA of")
	fs.StringVar(&o.PushAddress, "push-address", ":8443", "where agents are served")
	fs.IntVar(&o.WebhookPort, "webhook-port", 9443, "port of the webhooks")
	fs.StringVar(&o.MetricsAddress, "metrics-address", ":8080", "where metrics are served; 0 for nowhere")
	fs.StringVar(&o.HealthAddress, "health-address", ":8081", "where /healthz and /readyz are served; 0 for nowhere")
	fs.StringVar(&o.WebhookClientCA, "webhook-client-ca", "", "file with the CAs, in PEM, of the certificate that the apiserver presents to webhooks; requests without one are refused then (default: none is asked for)")
	fs.Func("webhook-client-names", "common names, separated by commas, of which the apiserver's certificate has one (default: any)", func(names string) error {
		o.WebhookClientNames = strings.Split(names, ",")
		return nil
	})
	fs.Float64Var(&o.StampRate, "stamp-rate", 200, "existing objects labelled per second at most")
	fs.IntVar(&o.StampBurst, "stamp-burst", 400, "existing objects labelled at once at most")
	fs.DurationVar(&o.StampEvery, "stamp-every", 10*time.Minute, "time between searches for objects without labels")
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
	if len(o.WebhookClientNames) > 0 && o.WebhookClientCA == "" {
		return errors.New("--webhook-client-names needs --webhook-client-ca")
	}
	if o.StampRate <= 0 || o.StampBurst < 1 || o.StampEvery <= 0 {
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
