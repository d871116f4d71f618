package manager

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/manager/apiserver"
	"github.com/ctrlmesh/ctrlmesh/manager/controllers"
	"github.com/ctrlmesh/ctrlmesh/manager/platform"
)

func TestWhatTriggersEachController(t *testing.T) {
	w := newWorld(t)
	names := []string{}
	for name := range w.specs {
		names = append(names, name)
	}
	slices.Sort(names)
	triggered := func() (out []string) {
		for _, name := range names {
			if w.Triggered(name) {
				out = append(out, name)
			}
		}
		return out
	}
	triggered() // by the bootstrap
	state, changed := w.replica.state, &w.replica.state.Changed
	cluster := func(version string) func() {
		return func() { state.Cluster.Store(&meshv1.Cluster{Version: version}) }
	}
	bundle := func(text string) func() {
		return func() { state.MeshBundle.Store(new([]byte(text))) }
	}
	settings := func(timeout time.Duration) func() {
		return func() { state.Settings.Store(platform.Default().WithRequestTimeout(timeout)) }
	}
	listed := &controllers.Listed{}
	for _, c := range []struct {
		what   string
		change func()
		want   []string
	}{
		{"objects", changed.Objects.Notify, []string{"policies"}},
		{"settings", settings(state.RequestTimeout()), []string{"stamp"}},
		{"additional addresses", func() { state.Additional.Store(&apiserver.Additional{}) }, []string{"policies"}},
		{"request timeout", settings(5 * time.Minute), []string{"policies", "stamp"}},
		{"addresses of the apiserver", cluster("1"), []string{"trust"}},
		{"the same addresses", cluster("1"), nil},
		{"listed", func() { state.Listed.Store(listed) }, []string{"roots"}},
		{"namespaces", func() { state.Listed.Store(&controllers.Listed{Namespaces: []string{"ns"}}) }, []string{"roots", "stamp"}},
		{"first policies", func() { state.Compiled.Store(&controllers.Compiled{Listed: listed}) }, []string{"bundles", "grants", "roots", "shares", "stamp", "status", "traffic", "webhooks"}},
		{"policies", func() { state.Compiled.Store(&controllers.Compiled{Listed: listed}) }, []string{"grants", "shares", "status", "traffic", "webhooks"}},
		{"keys of roots", changed.Roots.Notify, []string{"policies"}},
		{"demands of roots", changed.Demands.Notify, []string{"locks"}},
		{"holders of locks", changed.Locks.Notify, []string{"policies", "status"}},
		{"reports of agents", changed.Agents.Notify, []string{"failover", "nodes", "roots", "shares", "status", "traffic"}},
		{"counts of rules", changed.Counts.Notify, []string{"traffic"}},
		{"mesh CA", changed.MeshCA.Notify, []string{"bundles", "policies"}},
		{"egress CA", changed.EgressCA.Notify, []string{"bundles"}},
		{"a bundle that was edited", changed.Bundles.Notify, []string{"bundles"}},
		{"bundles", bundle("a"), []string{"trust"}},
		{"the same bundles", bundle("a"), nil},
		{"recorded shares", changed.Shares.Notify, []string{"policies"}},
		{"unrecorded shares", changed.Unrecorded.Notify, []string{"traffic"}},
		{"a record of shares", changed.Recorded.Notify, []string{"shares"}},
		{"labels of objects", changed.Stamping.Notify, []string{"status"}},
		{"weights", changed.Weights.Notify, []string{"roots"}},
	} {
		c.change()
		require.Equal(t, c.want, triggered(), c.what)
	}
}

func TestPeriodsOfControllers(t *testing.T) {
	type period struct {
		debounce, resync time.Duration
		rests            bool
	}
	const ms, s = time.Millisecond, time.Second
	is := map[string]period{}
	for name, spec := range newWorld(t).specs {
		is[name] = period{spec.Debounce, spec.Resync, spec.Rests}
	}
	require.Equal(t, map[string]period{
		"policies":  {50 * ms, 0, false},
		"roots":     {10 * ms, 10 * s, false},
		"locks":     {10 * ms, 2 * s, false}, // as often as clients renew theirs
		"grants":    {50 * ms, time.Minute, false},
		"failover":  {0, 0, true},
		"trust":     {s, time.Minute, false},
		"addresses": {50 * ms, 30 * s, false},
		"bundles":   {50 * ms, 10 * time.Minute, true},
		"stamp":     {50 * ms, time.Minute, false},
		"status":    {200 * ms, 10 * s, true},
		"nodes":     {s, 15 * s, false},
		"shares":    {10 * ms, 10 * s, true},
		"usage":     {0, time.Minute, false},
		"traffic":   {200 * ms, 10 * s, true},
		"endpoint":  {0, 15 * s, false},
		"webhooks":  {200 * ms, 10 * s, true},
	}, is)
}
