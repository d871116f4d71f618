package trial

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

// Result is the result of a trial.
type Result struct {
	Operator, Version  string
	Key, Method, Locks string
	// Source and Needed say where the manifests come from, and what they needed.
	Source, Needed, Shared string
	// Published is true if the operator's module has the manifests.
	Published bool
	// RBACByHand counts roles and bindings beside those of the operator's manifests.
	RBACByHand int
	// GrantedLocks are those that the mesh permitted the operator to use.
	GrantedLocks []string
	// Advice before it was divided; nil from an earlier version of the trial.
	Advice  *Advice
	Sizes   []int32
	Divided bool
	Violations
	Writes, OutsideWrites int
	Reviews               map[string]int // by the agents' decision; empty without webhooks
	AdoptionGapP99        int64          // ms
	Took                  time.Duration
	Problem               string
}

// Violations count broken guarantees of the mesh.
type Violations struct{ TwoOwners, Unreconciled, SilentStops, Differences int }

func newResult(b *Built, plan Schedule) (*Result, error) {
	byHand, err := b.rbacByHand()
	return &Result{
		Operator: b.Name, Version: b.Version, Key: "Namespace", Locks: b.locks(), Shared: b.Note, Sizes: plan.Sizes,
		Source: b.Source.String(), Needed: b.Needed, Published: b.Source.published(), RBACByHand: byHand,
	}, err
}

// locks describes how the mesh knows the operator's locks.
func (b *Built) locks() string {
	switch {
	case b.Lockless:
		return "none"
	case b.Lock == nil:
		return "discovered"
	case b.Lock.Namespace == "":
		return b.Lock.Name + ", in its own namespace"
	default:
		return b.Lock.Namespace + "/" + b.Lock.Name
	}
}

// OK reports whether the mesh kept its guarantees.
func (r *Result) OK() bool {
	return r.Divided && r.Problem == "" && r.RBACByHand == 0 && r.Violations == (Violations{})
}

// String returns the result in one line.
func (r *Result) String() string {
	line := fmt.Sprintf("%s %s: divided=%t method=%s writes=%d outside=%d two_owners=%d unreconciled=%d silent_stops=%d adoption_gap_p99_ms=%d differences=%d rbac_by_hand=%s granted_locks=%d (%v)",
		r.Operator, r.Version, r.Divided, r.Method, r.Writes, r.OutsideWrites, r.TwoOwners, r.Unreconciled, r.SilentStops,
		r.AdoptionGapP99, r.Differences, r.byHand(), len(r.GrantedLocks), r.Took.Round(time.Second))
	if len(r.Reviews) > 0 {
		line += fmt.Sprintf(" reviews_local=%d forwarded=%d unreachable=%d", r.Reviews["local"], r.Reviews["forwarded"], r.Reviews["unreachable"])
	}
	if r.Problem != "" {
		line += ": " + strings.ReplaceAll(r.Problem, "\n", "; ")
	}
	return line
}

// byHand returns RBACByHand, or that there are no manifests that it would add to.
func (r *Result) byHand() string {
	if !r.Published {
		return "unpublished"
	}
	return strconv.Itoa(r.RBACByHand)
}

// Save writes the result to the folder of the cluster's state, where Latest finds it.
func (r *Result) Save(c *kube.Cluster) error {
	text, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return fmt.Errorf("encoding the result of %s: %w", r.Operator, err)
	}
	file := resultFile(c, r.Operator)
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		return fmt.Errorf("keeping the result of %s: %w", r.Operator, err)
	}
	return os.WriteFile(file, text, 0o644)
}

// Latest returns the last result of each operator that was tried, in the order of the catalogue.
func Latest(c *kube.Cluster) (out []*Result, err error) {
	for _, o := range Catalogue() {
		text, err := os.ReadFile(resultFile(c, o.Name))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("reading the result of %s: %w", o.Name, err)
		}
		r := &Result{}
		if err := json.Unmarshal(text, r); err != nil {
			return nil, fmt.Errorf("reading the result of %s: %w", o.Name, err)
		}
		out = append(out, r)
	}
	return out, nil
}

func resultFile(c *kube.Cluster, operator string) string {
	return filepath.Join(c.Root, ".run", "operators", operator+".json")
}

// Summary is the last line of a run. The p99 is that of the slowest operator. Roles and bindings
// by hand are counted for operators that publish manifests.
func Summary(results []*Result) (line string, ok bool) {
	var divided, byHand int
	var all Violations
	var gap int64
	ok = len(results) > 0
	for _, r := range results {
		if r.Divided {
			divided++
		}
		all.TwoOwners += r.TwoOwners
		all.Unreconciled += r.Unreconciled
		all.SilentStops += r.SilentStops
		all.Differences += r.Differences
		byHand += r.RBACByHand
		gap, ok = max(gap, r.AdoptionGapP99), ok && r.OK()
	}
	return fmt.Sprintf("operators: tried=%d divided=%d two_owners=%d unreconciled=%d silent_stops=%d adoption_gap_p99_ms=%d differences=%d rbac_by_hand=%d",
		len(results), divided, all.TwoOwners, all.Unreconciled, all.SilentStops, gap, all.Differences, byHand), ok
}
