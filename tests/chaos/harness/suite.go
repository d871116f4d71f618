// Package harness has what the chaos suites share: access to the cluster under test, failures
// of its components, its logs, and the result of a run.
package harness

import (
	"context"
	"fmt"
	"slices"
	"strings"
)

// Suite is a sequence of parts that share counts.
type Suite struct {
	Name   string
	Parts  []Part
	Counts func() []Count
}

// Part is a step of a suite that takes some of its counts.
type Part struct {
	Name string
	Run  func(context.Context) error
}

// Select returns the parts that only names, separated by commas, in the suite's order.
// An empty string selects all parts.
func (s Suite) Select(only string) ([]Part, error) {
	if only == "" {
		return s.Parts, nil
	}
	wanted := strings.Split(only, ",")
	var out []Part
	for _, p := range s.Parts {
		if slices.Contains(wanted, p.Name) {
			out = append(out, p)
			wanted = slices.DeleteFunc(wanted, func(name string) bool { return name == p.Name })
		}
	}
	if len(wanted) > 0 {
		return nil, fmt.Errorf("suite %s has no part %q", s.Name, wanted)
	}
	return out, nil
}
