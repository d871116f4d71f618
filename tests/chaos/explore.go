package main

import (
	"context"
	"fmt"
	"os/exec"
	"regexp"
	"strconv"
)

// exploredStates is how the explorer of manager/handover tells of its work.
var exploredStates = regexp.MustCompile(`states_explored=(\d+)`)

// explore goes through every state of a small world, without a cluster.
func explore(ctx context.Context, w *world, r *result) error {
	cmd := exec.CommandContext(ctx, "go", "test", "-count=1", "-run", "Explore", "-v", "./manager/handover")
	cmd.Dir = w.Root
	out, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("exploring: %w: %s", err, out)
	}
	for _, found := range exploredStates.FindAllSubmatch(out, -1) {
		n, err := strconv.Atoi(string(found[1]))
		if err != nil {
			return fmt.Errorf("exploring: %w", err)
		}
		r.sharding.explored += n
	}
	return nil
}
