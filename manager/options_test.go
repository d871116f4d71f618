package manager

import (
	"testing"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"
)

func TestOptions(t *testing.T) {
	var o Options
	o.AddFlags(pflag.NewFlagSet("", pflag.ContinueOnError), func(k string) string {
		return map[string]string{"POD_NAMESPACE": "mesh", "POD_IP": "10.0.0.7"}[k]
	})
	require.NoError(t, o.validate())
	o.Prometheus = PrometheusOptions{TokenFile: "token"}
	require.EqualError(t, o.validate(), "--analysis-prometheus-token-file and --analysis-prometheus-ca-file need --analysis-prometheus-url")
	o.Prometheus.URL = "prometheus:9090"
	require.ErrorContains(t, o.validate(), "--analysis-prometheus-url: invalid URL")
	o.Prometheus.URL = "http://prometheus:9090"
	require.NoError(t, o.validate())
	o.PodIP = "x"
	require.ErrorContains(t, o.validate(), "POD_IP")
	o.Namespace = "default"
	require.ErrorContains(t, o.validate(), "one of its own")
	o.Namespace = ""
	require.ErrorContains(t, o.validate(), "POD_NAMESPACE")
}
