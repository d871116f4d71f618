package main

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func good() *result {
	r := &result{
		modes: ways, starts: 200, kills: 50, recoveries: []time.Duration{time.Second}, upgrades: 10,
		losses: 20, repaired: 20, openDirect: "ok", looked: true, held: 9, of: 9,
	}
	for _, p := range suites["capture"] {
		r.ran = append(r.ran, p.name)
	}
	return r
}

func TestResult(t *testing.T) {
	r := good()
	require.Empty(t, r.wrong("capture"))
	require.Equal(t, "capture: modes=3 starts=200 leaked=0 agent_kills=50 unsharded=0 recover_p99_ms=1000 upgrades=10 failed=0 relists=0 "+
		"hook_losses=20 repaired=20 open_direct=ok cleanup_left=0 hostile=9/9", r.line("capture"))

	for _, c := range []struct {
		says  string
		spoil func(*result)
	}{
		{"modes=2", func(r *result) { r.modes = ways[:2] }},
		{"starts=199", func(r *result) { r.starts-- }},
		{"leaked=1", func(r *result) { r.leaked++ }},
		{"agent_kills=49", func(r *result) { r.kills-- }},
		{"unsharded=1", func(r *result) { r.unsharded++ }},
		{"recover_p99_ms=5001", func(r *result) { r.recoveries = []time.Duration{5001 * time.Millisecond} }},
		{"recover_p99_ms=0", func(r *result) { r.recoveries = nil }},
		{"upgrades=9", func(r *result) { r.upgrades-- }},
		{"failed=1", func(r *result) { r.failed++ }},
		{"relists=1", func(r *result) { r.relists++ }},
		{"hook_losses=19", func(r *result) { r.losses-- }},
		{"repaired=19", func(r *result) { r.repaired-- }},
		{"open_direct=", func(r *result) { r.openDirect = "" }},
		{"cleanup_left=1", func(r *result) { r.left = []string{"a chain"} }},
		{"left: a chain", func(r *result) { r.left = []string{"a chain"} }},
		{"cleanup_left=unknown", func(r *result) { r.looked = false }},
		{"hostile=8/9", func(r *result) { r.held-- }},
		{"hostile=0/0", func(r *result) { r.held, r.of = 0, 0 }},
		{"kills: the node is gone", func(r *result) { r.doubt("kills: the node is gone") }},
	} {
		t.Run(c.says, func(t *testing.T) {
			r := good()
			c.spoil(r)
			require.Contains(t, r.wrong("capture"), c.says)
		})
	}
}

// What did not run is not counted, and is not taken for good.
func TestResultOfSomeParts(t *testing.T) {
	r := &result{ran: []string{"cleanup"}, modes: ways, looked: true}
	require.Empty(t, r.wrong("capture"))
	require.Contains(t, r.line("capture"), " starts=- leaked=- ")
	require.Contains(t, r.line("capture"), " cleanup_left=0 ")
	require.NotEmpty(t, (&result{}).wrong("capture"))
}

// Every count is taken by a part that there is, and every part takes a count.
func TestCountsHaveParts(t *testing.T) {
	var counted []string
	for _, f := range good().fields() {
		counted = append(counted, f.parts...)
	}
	for _, p := range suites["capture"] {
		require.Contains(t, counted, p.name)
		counted = slices.DeleteFunc(counted, func(part string) bool { return part == p.name })
	}
	require.Empty(t, counted, "parts that there are not")
}

func TestPercentile(t *testing.T) {
	var all []time.Duration
	for i := range 100 {
		all = append(all, time.Duration(100-i))
	}
	require.Equal(t, time.Duration(99), percentile(all, 0.99))
	require.Equal(t, time.Duration(50), percentile(all[50:], 0.99))
	require.Equal(t, time.Duration(7), percentile([]time.Duration{7}, 0.99))
	require.Zero(t, percentile(nil, 0.99))
}

func TestChoose(t *testing.T) {
	parts, err := choose("capture", "cleanup,kills")
	require.NoError(t, err)
	require.Equal(t, "kills", parts[0].name)
	require.Equal(t, "cleanup", parts[1].name)
	_, err = choose("capture", "kils")
	require.ErrorContains(t, err, `no part ["kils"]`)
	_, err = choose("sharding", "")
	require.ErrorContains(t, err, "no suite")
}
