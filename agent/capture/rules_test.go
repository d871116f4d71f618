package capture

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	goiptables "github.com/coreos/go-iptables/iptables"
	"github.com/stretchr/testify/require"

	"github.com/ctrlmesh/ctrlmesh/agent/capture/program/programtest"
)

func TestCommandsGetTheTimeThatIsLeft(t *testing.T) {
	dir := t.TempDir()
	script := "#!/bin/sh\n" + `[ "$1" = --version ] && echo "$0 v1.8.9 (nf_tables)" || echo "$@"` + "\n"
	for _, name := range []string{"iptables-echo", "iptables-echo-restore"} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(script), 0o755))
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	programtest.Link(t, "iptables-echo")
	tables, err := openNATTables("echo")
	require.NoError(t, err)
	require.ErrorIs(t, tables[1].err, exec.ErrNotFound)

	for left, wait := range map[time.Duration]string{0: "3", 1900 * time.Millisecond: "2", time.Minute: "3"} {
		ctx := t.Context()
		if left != 0 {
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, left)
			defer cancel()
		}
		require.NoError(t, tables[0].within(ctx, func(commands *goiptables.IPTables) error {
			lines, err := commands.List(nat, chain)
			require.Equal(t, []string{"-t nat -S " + chain + " --wait " + wait}, lines)
			return err
		}))
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, tables[0].within(ctx, func(*goiptables.IPTables) error {
		t.Error("a command ran")
		return nil
	}), context.Canceled)
}

func TestMissingLinkIsNotMissingIPTables(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"iptables", "iptables-restore"} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), nil, 0o755))
	}
	t.Setenv("PATH", dir)
	_, err := openNATTables("")
	require.ErrorContains(t, err, "iptables-bounded, which must be a link to this binary")
	require.NotErrorIs(t, err, exec.ErrNotFound)
}

func TestListingOfFilledChainIsBounded(t *testing.T) {
	cfg := iptablesConfig(t)
	w := newWorld(t)
	pod := w.pod()
	p := captured(t, w.agent(cfg), uid, pod, "mesh")
	var rules strings.Builder
	rules.WriteString("*nat\n")
	for i := range 2000 {
		fmt.Fprintf(&rules, "-A %s -d 10.0.%d.%d/32 -p tcp -m tcp --dport 1 -j ACCEPT\n", chain, i>>8, i&255)
	}
	rules.WriteString("COMMIT\n")
	fill := exec.Command("iptables-"+cfg.IPTables+"-restore", "--noflush")
	fill.Stdin = strings.NewReader(rules.String())
	require.NoError(t, pod.do(fill.Run))

	table := p.way.(*iptables).tables[0]
	require.ErrorContains(t, pod.do(func() error {
		_, err := table.leads(t.Context())
		return err
	}), "exit status 125")
	require.Error(t, pod.do(func() error {
		_, err := table.lastLeads(t.Context())
		return err
	}))
	require.ErrorContains(t, p.Release(), "exit status 125", "the rules may be another agent's")
	require.NoError(t, Cleanup(cfg, pod.path), "by any agent")
	require.NoError(t, pod.do(func() error {
		require.False(t, table.mayExist(nat), "the chain still exists")
		return nil
	}))
}
