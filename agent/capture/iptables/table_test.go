package iptables

import (
	"context"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	goiptables "github.com/coreos/go-iptables/iptables"
	"github.com/stretchr/testify/require"

	"github.com/ctrlmesh/ctrlmesh/agent/capture/program"
	"github.com/ctrlmesh/ctrlmesh/agent/capture/program/programtest"
)

func TestCommandsGetTheTimeThatIsLeft(t *testing.T) {
	dir := t.TempDir()
	script := "#!/bin/sh\n" + `[ "$1" = --version ] && echo "$0 v1.8.9 (nf_tables)" || echo "$@"` + "\n"
	for _, name := range []string{"iptables", "iptables-restore"} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(script), 0o755))
	}
	compiler, err := exec.LookPath("go")
	require.NoError(t, err)
	t.Setenv("PATH", dir+":"+filepath.Dir(compiler)+":/usr/bin:/bin") // without ip6tables
	programtest.Link(t)
	tables, err := OpenTables()
	require.NoError(t, err)
	require.ErrorIs(t, tables[1].err, exec.ErrNotFound)

	const whole = int(program.Time / time.Second)
	for _, left := range []time.Duration{program.Time - 100*time.Millisecond, program.Time / 2, 2 * program.Time, 0} {
		ctx := t.Context()
		if left != 0 {
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, left)
			defer cancel()
		}
		require.NoError(t, tables[0].within(ctx, func(commands *goiptables.IPTables) error {
			lines, err := commands.List(nat, Chain)
			require.Len(t, lines, 1)
			var wait int
			_, scanned := fmt.Sscanf(lines[0], "-t nat -S "+Chain+" --wait %d", &wait)
			require.NoError(t, scanned, lines[0])
			if deadline, ok := ctx.Deadline(); ok && left < program.Time {
				require.LessOrEqual(t, wait, int(math.Ceil(left.Seconds())))
				require.GreaterOrEqual(t, wait, int(math.Ceil(time.Until(deadline).Seconds())))
			} else {
				require.Equal(t, whole, wait)
			}
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
	_, err := OpenTables()
	require.ErrorContains(t, err, "iptables-bounded, which must be a link to this binary")
	require.NotErrorIs(t, err, exec.ErrNotFound)
}
