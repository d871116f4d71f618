package main

import (
	"context"
	"flag"
	"fmt"
	"strings"
	"time"

	"github.com/ctrlmesh/ctrlmesh/tests/kube"
	"github.com/ctrlmesh/ctrlmesh/tests/stats"
)

// Limits on a node with 110 captured pods.
const (
	enrolledWithin = 2 * time.Second
	mostMemory     = 60e6
	mostAtRest     = 5 * time.Millisecond // of processor time a second
)

// patience is how long a busy machine may take to start, or stop, a node full of pods.
const patience = 15 * time.Minute

func main() {
	pods := flag.Int("pods", 110, "how many pods")
	node := flag.String("node", "node1", "where")
	modes := flag.String("modes", "ebpf,iptables", "ways of capture")
	flag.Parse()
	kube.Main("density", func(ctx context.Context) (bool, error) { return run(ctx, *pods, *node, strings.Split(*modes, ",")) })
}

func run(ctx context.Context, pods int, node string, modes []string) (held bool, err error) {
	cluster, err := kube.Connect()
	if err != nil {
		return false, err
	}
	held = true
	for _, mode := range modes {
		f, err := measure(ctx, &full{cluster: cluster, node: node, pods: pods, mode: mode})
		if err != nil {
			return false, fmt.Errorf("%s: %w", mode, err)
		}
		missed := f.missed()
		held = held && len(missed) == 0
		verdict := "ok"
		if len(missed) > 0 {
			verdict = "MISSED: " + strings.Join(missed, ", ")
		}
		fmt.Printf("density: pods=%d mode=%s %v %s\n", pods, mode, f, verdict)
	}
	return held, nil
}

// figures are the results of one capture mode.
type figures struct {
	enrolled, answered time.Duration // since the start of the process after the killed one
	memory             stats.Memory  // after the time without requests
	atRest             time.Duration // of processor time a second, without requests
	handover, rollout  time.Duration // of the pods, since the process's start; of the whole rollout
	peakOld, peakNew   int64
	failed             int // requests during the roll-out
}

func (f figures) missed() (what []string) {
	if f.enrolled >= enrolledWithin {
		what = append(what, fmt.Sprintf("enrolled_s < %v", enrolledWithin.Seconds()))
	}
	if f.memory.Resident >= mostMemory {
		what = append(what, fmt.Sprintf("rss_mb < %v", mostMemory/1e6))
	}
	if f.atRest > mostAtRest {
		what = append(what, fmt.Sprintf("idle_ms_per_s <= %v", mostAtRest.Milliseconds()))
	}
	if f.failed > 0 {
		what = append(what, "handover_failed = 0")
	}
	return what
}

func (f figures) String() string {
	return fmt.Sprintf("enrolled_s=%.2f answered_s=%.2f rss_mb=%d rss_file_mb=%d idle_ms_per_s=%.1f handover_s=%.2f rollout_s=%.1f handover_failed=%d peak_old_mb=%d peak_new_mb=%d",
		f.enrolled.Seconds(), f.answered.Seconds(), f.memory.Resident/1e6, f.memory.File/1e6, float64(f.atRest.Microseconds())/1000,
		f.handover.Seconds(), f.rollout.Seconds(), f.failed, f.peakOld/1e6, f.peakNew/1e6)
}
