package trial

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/failure"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
	"github.com/ctrlmesh/ctrlmesh/manager/usage"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

// Advice is what the plugin says about an operator that is observed, before it is divided.
type Advice struct {
	Verdict, Because string
	Divide           []string // as group/resource
	Locks            []string // as namespace/name
	Risks            []string
	// Missing are resources that the trial divides and the advice does not name: the operator did not
	// write them yet, or does not watch them in all namespaces.
	Missing []string
}

// observed puts the operator on the mesh without a root, and asks for advice once its changes were
// reconciled there. It removes the operator again.
func (t *trial) observed(ctx context.Context, c *churn, result *Result) error {
	if err := t.label(ctx, true); err != nil {
		return err
	}
	if err := c.reconciled(ctx); err != nil {
		return err
	}
	_ = kube.Sleep(ctx, t.plan.Churn)
	if err := t.recorded(ctx, time.Now()); err != nil {
		return err
	}
	err := t.until(ctx, "advice", func(ctx context.Context) (err error) {
		result.Advice, err = t.advise(ctx)
		return err
	})
	if err != nil {
		return err
	}
	advice := result.Advice
	advice.Missing = advice.missing(t.Divided)
	t.say("  advice: %s; divide %s; locks %s", advice.Verdict, strings.Join(advice.Divide, ", "), strings.Join(advice.Locks, ", "))
	if len(advice.Missing) > 0 {
		t.say("  ! divided, and not advised: %s", strings.Join(advice.Missing, ", "))
	}
	return t.label(ctx, false)
}

// recorded waits until the record of what the operator requests contains all up to a time.
func (t *trial) recorded(ctx context.Context, to time.Time) error {
	return t.until(ctx, "the record of its requests", func(ctx context.Context) error {
		cm := &corev1.ConfigMap{}
		if err := t.Get(ctx, client.ObjectKey{Namespace: t.Home, Name: usage.ConfigMap}, cm); err != nil {
			return err
		}
		for _, p := range usage.Decode(cm.Data)[usage.Key(t.workload())].GetPods() {
			if time.UnixMilli(p.GetUsage().GetLastMs()).After(to) {
				return nil
			}
		}
		return errors.New("it is older")
	})
}

func (t *trial) workload() layout.Workload {
	return layout.Workload{Kind: t.Kind, Name: t.target.GetName()}
}

// advise runs the plugin. It returns an error while too little is known.
func (t *trial) advise(ctx context.Context) (*Advice, error) {
	out, err := t.Plugin(ctx, "advise", t.workload().Argument(), "-n", t.Home, "-o", "json").Output()
	exited, _ := errors.AsType[*exec.ExitError](err)
	switch {
	case exited != nil && exited.ExitCode() == 1: // it should not be divided by namespace
	case exited != nil:
		return nil, fmt.Errorf("%w: %s", err, strings.TrimSpace(string(exited.Stderr)))
	case err != nil:
		return nil, err
	}
	advice := &Advice{}
	return advice, failure.Wrap(json.Unmarshal(out, advice), "reading the advice")
}

// missing finds the divided resources that the advice does not name.
func (a *Advice) missing(divided []meshv1alpha1.ResourceGroup) (out []string) {
	for _, g := range divided {
		for _, group := range g.APIGroups {
			for _, resource := range g.Resources {
				if name := strings.TrimPrefix(group+"/"+resource, "/"); !slices.Contains(a.Divide, name) {
					out = append(out, name)
				}
			}
		}
	}
	return out
}
