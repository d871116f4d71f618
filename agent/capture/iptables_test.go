package capture

import (
	"fmt"
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/ctrlmesh/ctrlmesh/agent/capture/iptables"
)

func TestListingOfFilledChainIsBounded(t *testing.T) {
	cfg := iptablesConfig(t)
	w := newWorld(t)
	pod := w.pod()
	p := captured(t, w.agent(cfg), uid, pod, "mesh")
	var listing strings.Builder
	listing.WriteString("*nat\n")
	for i := range 2000 {
		fmt.Fprintf(&listing, "-A %s -d 10.0.%d.%d/32 -p tcp -m tcp --dport 1 -j ACCEPT\n", iptables.Chain, i>>8, i&255)
	}
	listing.WriteString("COMMIT\n")
	fill := exec.Command("iptables-restore", "--noflush")
	fill.Stdin = strings.NewReader(listing.String())
	require.NoError(t, pod.do(fill.Run))

	table := p.redirector.(*iptables.Backend).Tables[0]
	require.ErrorContains(t, pod.do(func() error {
		_, err := table.Lead(t.Context())
		return err
	}), "exit status 125")
	require.Error(t, pod.do(func() error {
		_, err := table.LastLead(t.Context())
		return err
	}))
	require.ErrorContains(t, p.Release(), "exit status 125", "the rules may be another agent's")
	require.NoError(t, Cleanup(cfg.PinDir, pod.path), "by any agent")
	require.NoError(t, pod.do(func() error {
		require.False(t, table.MayExist(), "the chain still exists")
		return nil
	}))
}
