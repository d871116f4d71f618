package manager

import (
	"flag"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestOptions(t *testing.T) {
	var o Options
	o.AddFlags(flag.NewFlagSet("", flag.ContinueOnError), func(k string) string {
		return map[string]string{"POD_NAMESPACE": "mesh", "POD_IP": "10.0.0.7"}[k]
	})
	require.NoError(t, o.validate())
	o.PodIP = "x"
	require.ErrorContains(t, o.validate(), "POD_IP")
	o.Namespace = "default"
	require.ErrorContains(t, o.validate(), "one of its own")
	o.Namespace = ""
	require.ErrorContains(t, o.validate(), "POD_NAMESPACE")
}
