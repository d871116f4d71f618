// Package alerts is the chaos suite of alerts: it causes what they are about, by one way each, until a real
// Prometheus lets them fire, and ends it until they end. Alerts that other suites cause are not here: `make alerts`
// runs those beside a Prometheus as well.
package alerts

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/ctrlmesh/ctrlmesh/tests/chaos/harness"
	"github.com/ctrlmesh/ctrlmesh/tests/chaos/harness/operator"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
	"github.com/ctrlmesh/ctrlmesh/tests/prometheus"
)

// patience is how long alerts may take to fire, and to end: all their times are shorter, hurried.
const patience = 3 * time.Minute

// suite is the state of a run.
type suite struct {
	*operator.Operators
	fired, ended []string
}

// parts are what causes alerts.
var parts = []struct {
	name   string
	alerts []string
	cause  func(*suite, context.Context, *provocation) error
}{
	{"cut-off", []string{"CtrlmeshAgentWithoutManager", "CtrlmeshPoliciesPending", "CtrlmeshHandoverPending", "CtrlmeshPodRefusedWithoutPolicy"}, (*suite).cutOff},
	{"foreign", []string{"CtrlmeshForeignRequestsRefused", "CtrlmeshTokensRefused"}, (*suite).foreign},
	{"undivided", []string{"CtrlmeshUndividedResources"}, (*suite).undivided},
	{"strangers", []string{"CtrlmeshStrangers"}, (*suite).strangers},
	{"bounds", []string{"CtrlmeshBoundsReached"}, (*suite).bounds},
	{"losses", []string{"CtrlmeshRedirectionLost", "CtrlmeshRedirectionsBreak"}, (*suite).losses},
	{"apiserver", []string{"CtrlmeshApiserverAway"}, (*suite).apiserver},
}

// New returns the suite of alerts.
func New(w *harness.Testbed, r *harness.Result) harness.Suite {
	s := &suite{Operators: operator.New(w, r)}
	out := harness.Suite{Name: "alerts"}
	var names []string
	for _, p := range parts {
		names = append(names, p.name)
		out.Parts = append(out.Parts, harness.Part{Name: p.name, Run: func(ctx context.Context) error {
			return s.run(ctx, p.alerts, func(ctx context.Context, is *provocation) error { return p.cause(s, ctx, is) })
		}})
	}
	out.Counts = func() []harness.Count {
		wanted := 0
		for _, p := range parts {
			if slices.Contains(r.Ran, p.name) {
				wanted += len(p.alerts)
			}
		}
		return []harness.Count{harness.Exactly("fired", len(s.fired), wanted, names...), harness.Exactly("ended", len(s.ended), wanted, names...)}
	}
	return out
}

// provocation is a part that runs: what lets alerts fire, and the Prometheus that says whether they do.
type provocation struct {
	*suite
	alerts   []string
	recorder *prometheus.Recorder
}

// run runs a part beside a Prometheus, and waits until its alerts have ended.
func (s *suite) run(ctx context.Context, alerts []string, part func(context.Context, *provocation) error) (err error) {
	r, err := prometheus.Record(ctx, s.Cluster)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	p := &provocation{s, alerts, r}
	if err := part(ctx, p); err != nil {
		return err
	}
	err = kube.UntilWithin(ctx, patience, "the alerts to end", func(ctx context.Context) error {
		return p.none(ctx, func(a prometheus.Alert) bool { return a.Firing })
	})
	if err == nil {
		s.ended = append(s.ended, alerts...)
	}
	return err
}

// fires waits until all alerts of the part have fired.
func (p *provocation) fires(ctx context.Context) error {
	err := kube.UntilWithin(ctx, patience, "the alerts", func(ctx context.Context) error {
		return p.none(ctx, func(a prometheus.Alert) bool { return !a.Fired })
	})
	if err == nil {
		p.fired = append(p.fired, p.alerts...)
		p.Logf("  fired: %s", strings.Join(p.alerts, ", "))
	}
	return err
}

// none returns an error that names the alerts of the part that are in a state.
func (p *provocation) none(ctx context.Context, are func(prometheus.Alert) bool) error {
	all, err := p.recorder.Alerts(ctx)
	if err != nil {
		return err
	}
	var names []string
	for _, a := range all {
		if slices.Contains(p.alerts, a.Name) && are(a) {
			names = append(names, a.Name)
		}
	}
	if len(names) > 0 {
		return fmt.Errorf("not yet: %s", strings.Join(names, ", "))
	}
	return nil
}
