package prometheus

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	promv1 "github.com/prometheus/client_golang/api/prometheus/v1"
	"github.com/prometheus/common/model"
	discoveryv1 "k8s.io/api/discovery/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/internal/failure"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

// Recorder is a Prometheus in the network of the cluster of tests/cluster. It finds agents and managers by the
// apiserver, and evaluates the alerts of the mesh, hurried.
type Recorder struct {
	*Server
	rules     []RuleGroup
	directory string
	network   *os.File
}

// every is how often the recorder scrapes and evaluates.
const every = "1s"

// scrapesWithin limits how long the first metrics of agents and managers may take.
const scrapesWithin = 90 * time.Second

// Record starts a recorder, and waits until it has metrics of agents and managers. It must be closed.
func Record(ctx context.Context, c *kube.Cluster) (r *Recorder, err error) {
	r = &Recorder{}
	if r.directory, err = os.MkdirTemp("", "ctrlmesh-alerts-"); err != nil {
		return nil, fmt.Errorf("recording alerts: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.Close())
		}
	}()
	pid, err := os.ReadFile(filepath.Join(c.Root, ".run", "units", "netns"))
	if err != nil {
		return r, fmt.Errorf("recording alerts: this needs the cluster of tests/cluster: %w", err)
	}
	if r.network, err = os.Open(filepath.Join("/proc", strings.TrimSpace(string(pid)), "ns", "net")); err != nil {
		return r, fmt.Errorf("recording alerts: %w", err)
	}
	groups, err := ReadRules(c.Root)
	if err != nil {
		return r, err
	}
	if r.rules, err = Hurried(groups); err != nil {
		return r, err
	}
	config, err := r.config(ctx, c)
	if err != nil {
		return r, err
	}
	if r.Server, err = Start(ctx, Options{Root: c.Root, Directory: r.directory, Config: config, Network: r.network}); err != nil {
		return r, err
	}
	return r, kube.UntilWithin(ctx, scrapesWithin, "the agents and managers to be scraped", r.scrapes)
}

// Close ends the recorder and removes its data.
func (r *Recorder) Close() error {
	var errs []error
	if r.Server != nil {
		errs = append(errs, r.Stop())
	}
	if r.network != nil {
		errs = append(errs, r.network.Close())
	}
	return errors.Join(append(errs, os.RemoveAll(r.directory))...)
}

// config returns the configuration of Prometheus, and writes the files that it names.
func (r *Recorder) config(ctx context.Context, c *kube.Cluster) (any, error) {
	file := func(name string) string { return filepath.Join(r.directory, name) }
	if err := write(file("rules.yaml"), map[string]any{"groups": r.rules}); err != nil {
		return nil, err
	}
	var slice discoveryv1.EndpointSlice
	if err := c.Get(ctx, client.ObjectKey{Namespace: "default", Name: "kubernetes"}, &slice); err != nil {
		return nil, fmt.Errorf("finding the apiserver: %w", err)
	}
	address := net.JoinHostPort(slice.Endpoints[0].Addresses[0], strconv.Itoa(int(*slice.Ports[0].Port)))
	tls := c.Config.TLSClientConfig
	for name, data := range map[string][]byte{"ca": tls.CAData, "cert": tls.CertData, "key": tls.KeyData} {
		if err := os.WriteFile(file(name), data, 0o600); err != nil {
			return nil, failure.Wrap(err, "writing the credentials")
		}
	}
	label := func(source, regex, target string) map[string]any {
		out := map[string]any{"source_labels": []string{"__meta_kubernetes_" + source}, "regex": regex, "action": "keep"}
		if target != "" {
			out["action"], out["target_label"] = "replace", target
		}
		return out
	}
	type object = map[string]any
	return object{
		"global":     object{"scrape_interval": every, "evaluation_interval": every},
		"rule_files": []string{file("rules.yaml")},
		"scrape_configs": []any{object{
			"job_name": "ctrlmesh", "honor_labels": true,
			"kubernetes_sd_configs": []any{object{
				"role": "pod", "api_server": "https://" + address, "namespaces": object{"names": []string{kube.SystemNamespace}},
				"tls_config": object{"ca_file": file("ca"), "cert_file": file("cert"), "key_file": file("key")},
			}},
			// As deploy/monitoring/podmonitors.yaml has the Prometheus operator do it.
			"relabel_configs": []any{
				label("pod_container_port_name", "metrics", ""),
				label("pod_phase", "Running", ""),
				label("namespace", "(.*)", "namespace"),
				label("pod_name", "(.*)", "pod"),
				label("pod_node_name", "(.*)", "node"),
			},
		}},
	}, nil
}

// Alert is what has become of an alert.
type Alert struct {
	Name   string
	Fired  bool
	Firing bool // now
}

// Alerts returns what has become of each alert.
func (r *Recorder) Alerts(ctx context.Context) (out []Alert, err error) {
	fired, err := r.named(ctx, `max_over_time(ALERTS{alertstate="firing"}[1d])`)
	if err != nil {
		return nil, err
	}
	firing, err := r.named(ctx, `ALERTS{alertstate="firing"}`)
	if err != nil {
		return nil, err
	}
	for _, g := range r.rules {
		for _, rule := range g.Rules {
			out = append(out, Alert{rule.Alert, fired[rule.Alert], firing[rule.Alert]})
		}
	}
	return out, nil
}

// named returns the names of alerts in the result of a query.
func (r *Recorder) named(ctx context.Context, query string) (map[string]bool, error) {
	value, _, err := r.Query(ctx, query, time.Time{}, promv1.WithTimeout(10*time.Second))
	if err != nil {
		return nil, fmt.Errorf("asking Prometheus: %w", err)
	}
	out := map[string]bool{}
	if vector, ok := value.(model.Vector); ok {
		for _, s := range vector {
			out[string(s.Metric[model.AlertNameLabel])] = true
		}
	}
	return out, nil
}

// scrapes returns an error until the metrics of agents and managers are there.
func (r *Recorder) scrapes(ctx context.Context) error {
	value, _, err := r.Query(ctx, `sum(ctrlmesh_captured_pods) and max(ctrlmesh_manager_agents_connected) > 0`, time.Time{})
	if err != nil {
		return fmt.Errorf("asking Prometheus: %w", err)
	}
	if vector, ok := value.(model.Vector); !ok || len(vector) == 0 {
		return errors.New("there are none yet")
	}
	return nil
}
