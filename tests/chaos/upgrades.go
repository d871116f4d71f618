package main

import (
	"context"
	"fmt"
	"time"

	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

// upgrades rolls the agents out anew, again and again, under the fleet. Its clients
// must not notice: no request fails, and no informer asks again for what it holds.
func upgrades(ctx context.Context, w *world, r *result) error {
	members, err := w.fleet(ctx, r)
	if err != nil {
		return err
	}
	if err := w.informersWork(ctx); err != nil {
		return err
	}
	for i := range wantUpgrades {
		if err := w.upgrade(ctx, r, members); err != nil {
			return fmt.Errorf("upgrade %d: %w", i+1, err)
		}
		r.upgrades++
	}
	return nil
}

func (w *world) upgrade(ctx context.Context, r *result, members []*member) error {
	begun, err := w.mark()
	if err != nil {
		return err
	}
	if err := w.rollOut(ctx); err != nil {
		return err
	}
	// What was under way when the last of them went counts too.
	if err := w.fleetWorks(ctx, time.Now()); err != nil {
		return err
	}
	if err := w.informersWork(ctx); err != nil {
		return err
	}
	over := time.Now()
	failed := 0
	for _, m := range members {
		all, err := m.asked()
		if err != nil {
			return err
		}
		n, example := count(stretch(all, begun.at, over), func(b beat) bool { return !b.good() })
		if n > 0 {
			w.say("  ! failed: %s: %s", m.Name, example)
		}
		failed += n
	}
	requests, err := w.requests(begun, ids(members)...)
	if err != nil {
		return err
	}
	relists := 0
	for _, q := range requests {
		if q.Agent == informerName && q.Fills() {
			if relists == 0 {
				w.say("  ! relist: %s", q)
			}
			relists++
		}
	}
	// Also those that fail open have no reason to go direct.
	leaked, err := w.leaks(ctx, requests, nil)
	if err != nil {
		return err
	}
	r.failed += failed
	r.relists += relists
	r.leaked += len(leaked)
	w.say("  rolled out in %v: of %d requests %d failed, %d relists, %d leaked", over.Sub(begun.at).Round(100*time.Millisecond), len(requests), failed, relists, len(leaked))
	return nil
}

// rollOut replaces the agents, and waits until the old ones are gone.
func (w *world) rollOut(ctx context.Context) error {
	workload := "daemonset/" + kube.AgentName
	for _, args := range [][]string{{"restart", workload}, {"status", workload, "--timeout=120s"}} {
		if _, err := w.Kubectl(ctx, append([]string{"-n", kube.SystemNamespace, "rollout"}, args...)...); err != nil {
			return err
		}
	}
	return w.until(ctx, "the old agents' end", w.oneAgentEach)
}

// oneAgentEach says where there is not exactly one agent.
func (w *world) oneAgentEach(ctx context.Context) error {
	for _, node := range w.nodes {
		if _, err := w.agentPID(ctx, node); err != nil {
			return err
		}
	}
	return nil
}
