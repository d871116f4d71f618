package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/ctrlmesh/ctrlmesh/tests/kube"
	"github.com/ctrlmesh/ctrlmesh/tests/stats"
)

const (
	settle = 10 * time.Second // wait before disturbing an agent that has just started
	idle   = 60 * time.Second // without requests, before reading its memory: about as long as between two collections
)

func measure(ctx context.Context, f *full) (out figures, err error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	defer func() { // the next mode needs the room, and an interrupted run leaves no pods
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
		defer cancel()
		err = errors.Join(err, f.empty(ctx))
	}()
	progress := func(what string) {
		fmt.Fprintf(os.Stderr, "%s %s: %s\n", time.Now().Format(time.TimeOnly), f.mode, what)
	}
	progress("starting the pods")
	if err := f.fill(ctx); err != nil {
		return out, err
	}
	if err := kube.Sleep(ctx, settle); err != nil {
		return out, err
	}
	progress("killing the agent")
	if err := f.measureStart(ctx, &out); err != nil {
		return out, fmt.Errorf("killing the agent: %w", err)
	}
	if err := kube.Sleep(ctx, settle); err != nil {
		return out, err
	}
	progress("rolling the agent out")
	if err := f.measureHandover(ctx, &out); err != nil {
		return out, fmt.Errorf("rolling the agent out: %w", err)
	}
	return out, nil
}

// measureStart kills the agent and measures the next one.
func (f *full) measureStart(ctx context.Context, out *figures) error {
	before, err := f.agent(ctx)
	if err != nil {
		return err
	}
	if err := before.kill(); err != nil {
		return err
	}
	after, enrolled, answered, err := f.await(ctx, time.Now())
	if err != nil {
		return err
	}
	out.enrolled, out.answered = enrolled.Sub(after.started), answered.Sub(after.started)
	if out.atRest, err = after.atRest(ctx); err != nil {
		return err
	}
	out.memory, err = stats.MemoryOf(after.pid)
	return err
}

// measureHandover replaces the agent and measures both.
func (f *full) measureHandover(ctx context.Context, out *figures) error {
	before, err := f.agent(ctx)
	if err != nil {
		return err
	}
	start := time.Now()
	err = f.roll(ctx, func() {
		if m, err := stats.MemoryOf(before.pid); err == nil { // until it ends
			out.peakOld = m.Peak
		}
	})
	if err != nil {
		return err
	}
	out.rollout = time.Since(start)
	after, enrolled, _, err := f.await(ctx, start)
	if err != nil {
		return err
	}
	out.handover = enrolled.Sub(after.started)
	m, err := stats.MemoryOf(after.pid)
	if err != nil {
		return err
	}
	out.peakNew = m.Peak
	out.failed, err = f.failed(start)
	return err
}

// await waits for an agent that started after since, that has captured all pods
// and answered their watches.
func (f *full) await(ctx context.Context, since time.Time) (p *process, enrolled, answered time.Time, err error) {
	err = kube.Until(ctx, "the next agent", func(ctx context.Context) (err error) {
		if p, err = f.agent(ctx); err != nil {
			return err
		}
		if enrolled, err = f.enrolled(since); err != nil {
			return err
		}
		answered, err = f.answered(since)
		return err
	})
	return p, enrolled, answered, err
}
