package traffic

import (
	"fmt"
	"net/http"
	"slices"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/tests/chaos/harness/operator"
	tallyv1 "github.com/ctrlmesh/ctrlmesh/tests/operators/tally/v1"
)

// scenario is a set of faults for a bounded time.
type scenario struct {
	name  string
	kinds []string // that must be injected, by their names in metrics
	rules []meshv1alpha1.HTTPFaultInjection
}

// faultKinds are all kinds of faults.
var faultKinds = []string{
	"delay", "abort", "reset", "reset_after_answer", "truncate", "slow_body", "stale_list",
	"watch_gone", "watch_cut", "watch_stall", "watch_delay", "watch_duplicate", "watch_drop",
}

// lockLost makes the operator's processes exit: they cannot renew their locks.
var lockLost = scenario{"lock-lost", []string{"abort"}, rules(meshv1alpha1.HTTPFaultInjection{
	Match: &meshv1alpha1.FaultMatch{Resources: []meshv1alpha1.FaultResourceMatch{{
		APIGroups: []string{"coordination.k8s.io"}, Resources: []string{"leases"}, Verbs: []string{"update", "patch"}, Names: []string{operator.Lock},
	}}},
	Abort: &meshv1alpha1.FaultAbort{HTTPStatus: http.StatusInternalServerError, Percent: "100"},
})}

// scenarios inject one fault each. Those that make clients list again come last: clients back
// off ever longer before they do.
var scenarios = []scenario{
	{"watch-delay", []string{"watch_delay"}, rules(inWatches(meshv1alpha1.FaultWatch{Delay: &meshv1alpha1.FaultDelay{FixedDelay: "300ms", Percent: "30"}}))},
	{"watch-duplicate", []string{"watch_duplicate"}, rules(inWatches(meshv1alpha1.FaultWatch{Duplicate: &meshv1alpha1.WatchDuplicate{Percent: "50"}}))},
	{"watch-drop", []string{"watch_drop"}, rules(inWatches(meshv1alpha1.FaultWatch{Drop: &meshv1alpha1.WatchDrop{Percent: "30", MadeUpAfter: "1s"}}))},
	{"watch-stall", []string{"watch_stall"}, rules(inWatches(meshv1alpha1.FaultWatch{Stall: &meshv1alpha1.WatchStall{Percent: "100", After: "500ms", Lasts: "2s"}}))},
	{"watch-cut", []string{"watch_cut"}, rules(inWatches(meshv1alpha1.FaultWatch{Cut: &meshv1alpha1.WatchEnd{Percent: "100", After: "1500ms"}}))},
	{"delay", []string{"delay"}, rules(delays("300ms", "50"))},
	{"conflict", []string{"abort"}, rules(aborts(http.StatusConflict, "30", "update"))},
	{"too-many", []string{"abort"}, rules(aborts(http.StatusTooManyRequests, "20", "update", "get"))},
	{"internal-error", []string{"abort"}, rules(aborts(http.StatusInternalServerError, "30", "update", "get"))},
	{"reset", []string{"reset"}, rules(resets(false, "30"))},
	{"reset-after-answer", []string{"reset_after_answer"}, rules(resets(true, "30"))},
	{"truncate", []string{"truncate"}, rules(truncates("30"))},
	{"slow-body", []string{"slow_body"}, rules(slows("30"))},
	{"expired", []string{"abort"}, rules(few(2, aborts(http.StatusGone, "100", "watch", "list")))},
	{"watch-gone", []string{"watch_gone"}, rules(few(2, inWatches(meshv1alpha1.FaultWatch{Gone: &meshv1alpha1.WatchEnd{Percent: "100", After: "1500ms"}})))},
	{"stale-list", []string{"stale_list"}, stale},
}

// stale injects stale lists, and makes clients list again.
var stale = rules(
	meshv1alpha1.HTTPFaultInjection{Match: ofTallies("list"), StaleList: &meshv1alpha1.FaultStaleList{Age: "2s", Percent: "100"}},
	few(2, inWatches(meshv1alpha1.FaultWatch{Gone: &meshv1alpha1.WatchEnd{Percent: "100", After: "2500ms"}})),
)

// together injects some of everything.
var together = scenario{"together", faultKinds, rules(
	delays("50ms", "20"),
	aborts(http.StatusConflict, "5", "update"),
	aborts(http.StatusGone, "5", "watch", "list"),
	aborts(http.StatusTooManyRequests, "3", "update", "get"),
	aborts(http.StatusInternalServerError, "10", "update", "get"),
	resets(false, "3"),
	resets(true, "3"),
	truncates("3"),
	slows("5"),
	meshv1alpha1.HTTPFaultInjection{Match: ofTallies("list"), StaleList: &meshv1alpha1.FaultStaleList{Age: "1s", Percent: "50"}},
	inWatches(meshv1alpha1.FaultWatch{
		Gone:      &meshv1alpha1.WatchEnd{Percent: "50", After: "2s"},
		Cut:       &meshv1alpha1.WatchEnd{Percent: "100", After: "3s"},
		Stall:     &meshv1alpha1.WatchStall{Percent: "50", After: "1s", Lasts: "1s"},
		Delay:     &meshv1alpha1.FaultDelay{FixedDelay: "100ms", Percent: "20"},
		Duplicate: &meshv1alpha1.WatchDuplicate{Percent: "20"},
		Drop:      &meshv1alpha1.WatchDrop{Percent: "20", MadeUpAfter: "1s"},
	}),
)}

// rules names rules, and gives each its own seed.
func rules(all ...meshv1alpha1.HTTPFaultInjection) []meshv1alpha1.HTTPFaultInjection {
	for i := range all {
		all[i].Name, all[i].Seed = fmt.Sprintf("rule-%d", i), new(int64(i+1))
	}
	return all
}

// few limits a rule to n requests of each pod.
func few(n int64, rule meshv1alpha1.HTTPFaultInjection) meshv1alpha1.HTTPFaultInjection {
	rule.Count = &n
	return rule
}

// ofTallies matches the operator's requests for its objects, by verbs. Without verbs it
// matches all.
func ofTallies(verbs ...string) *meshv1alpha1.FaultMatch {
	return &meshv1alpha1.FaultMatch{Resources: []meshv1alpha1.FaultResourceMatch{{
		APIGroups: []string{tallyv1.GroupVersion.Group}, Resources: []string{"tallies", "tallies/status"}, Verbs: slices.Clone(verbs),
	}}}
}

func delays(by meshv1alpha1.Duration, percent meshv1alpha1.Percent) meshv1alpha1.HTTPFaultInjection {
	return meshv1alpha1.HTTPFaultInjection{Match: ofTallies(), Delay: &meshv1alpha1.FaultDelay{FixedDelay: by, Percent: percent}}
}

func aborts(code int, percent meshv1alpha1.Percent, verbs ...string) meshv1alpha1.HTTPFaultInjection {
	return meshv1alpha1.HTTPFaultInjection{Match: ofTallies(verbs...), Abort: &meshv1alpha1.FaultAbort{HTTPStatus: code, Percent: percent}}
}

func resets(after bool, percent meshv1alpha1.Percent) meshv1alpha1.HTTPFaultInjection {
	return meshv1alpha1.HTTPFaultInjection{Match: ofTallies(), Reset: &meshv1alpha1.FaultReset{Percent: percent, AfterAnswer: after}}
}

func truncates(percent meshv1alpha1.Percent) meshv1alpha1.HTTPFaultInjection {
	return meshv1alpha1.HTTPFaultInjection{Match: ofTallies(), Truncate: &meshv1alpha1.FaultTruncate{AfterBytes: 100, Percent: percent}}
}

func slows(percent meshv1alpha1.Percent) meshv1alpha1.HTTPFaultInjection {
	return meshv1alpha1.HTTPFaultInjection{Match: ofTallies("get", "list", "update"), SlowBody: &meshv1alpha1.FaultSlowBody{BytesPerSecond: 4000, Percent: percent}}
}

func inWatches(f meshv1alpha1.FaultWatch) meshv1alpha1.HTTPFaultInjection {
	return meshv1alpha1.HTTPFaultInjection{Match: ofTallies("watch"), Watch: &f}
}
