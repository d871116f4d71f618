package main

import (
	"fmt"
	"net/http"
	"slices"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	tallyv1 "github.com/ctrlmesh/ctrlmesh/tests/operators/tally/v1"
)

// bout is some faults for a bounded time.
type bout struct {
	name  string
	kinds []string // that must come of it, as metrics call them
	rules []meshv1alpha1.HTTPFaultInjection
}

// faultKinds are all that there are.
var faultKinds = []string{
	"delay", "abort", "reset", "reset_after_answer", "truncate", "slow_body", "stale_list",
	"watch_gone", "watch_cut", "watch_stall", "watch_delay", "watch_duplicate", "watch_drop",
}

// lockLost ends the operator's processes: they give up when they cannot renew.
var lockLost = bout{"lock-lost", []string{"abort"}, harm(meshv1alpha1.HTTPFaultInjection{
	Match: &meshv1alpha1.FaultMatch{Resources: []meshv1alpha1.FaultResourceMatch{{
		APIGroups: []string{"coordination.k8s.io"}, Resources: []string{"leases"}, Verbs: []string{"update", "patch"}, Names: []string{operatorLock},
	}}},
	Abort: &meshv1alpha1.FaultAbort{HTTPStatus: http.StatusInternalServerError, Percent: "100"},
})}

// bouts, of each fault alone. Those that let clients list again come last: they wait
// ever longer before they do.
var bouts = []bout{
	{"watch-delay", []string{"watch_delay"}, harm(inWatches(meshv1alpha1.FaultWatch{Delay: &meshv1alpha1.FaultDelay{FixedDelay: "300ms", Percent: "30"}}))},
	{"watch-duplicate", []string{"watch_duplicate"}, harm(inWatches(meshv1alpha1.FaultWatch{Duplicate: &meshv1alpha1.WatchDuplicate{Percent: "50"}}))},
	{"watch-drop", []string{"watch_drop"}, harm(inWatches(meshv1alpha1.FaultWatch{Drop: &meshv1alpha1.WatchDrop{Percent: "30", MadeUpAfter: "1s"}}))},
	{"watch-stall", []string{"watch_stall"}, harm(inWatches(meshv1alpha1.FaultWatch{Stall: &meshv1alpha1.WatchStall{Percent: "100", After: "500ms", Lasts: "2s"}}))},
	{"watch-cut", []string{"watch_cut"}, harm(inWatches(meshv1alpha1.FaultWatch{Cut: &meshv1alpha1.WatchEnd{Percent: "100", After: "1500ms"}}))},
	{"delay", []string{"delay"}, harm(delays("300ms", "50"))},
	{"conflict", []string{"abort"}, harm(aborts(http.StatusConflict, "30", "update"))},
	{"too-many", []string{"abort"}, harm(aborts(http.StatusTooManyRequests, "20", "update", "get"))},
	{"internal-error", []string{"abort"}, harm(aborts(http.StatusInternalServerError, "30", "update", "get"))},
	{"reset", []string{"reset"}, harm(resets(false, "30"))},
	{"reset-after-answer", []string{"reset_after_answer"}, harm(resets(true, "30"))},
	{"truncate", []string{"truncate"}, harm(truncates("30"))},
	{"slow-body", []string{"slow_body"}, harm(slows("30"))},
	{"expired", []string{"abort"}, harm(few(2, aborts(http.StatusGone, "100", "watch", "list")))},
	{"watch-gone", []string{"watch_gone"}, harm(few(2, inWatches(meshv1alpha1.FaultWatch{Gone: &meshv1alpha1.WatchEnd{Percent: "100", After: "1500ms"}})))},
	{"stale-list", []string{"stale_list"}, stale},
}

// stale lists come only when clients list again.
var stale = harm(
	meshv1alpha1.HTTPFaultInjection{Match: ofTallies("list"), StaleList: &meshv1alpha1.FaultStaleList{Age: "2s", Percent: "100"}},
	few(2, inWatches(meshv1alpha1.FaultWatch{Gone: &meshv1alpha1.WatchEnd{Percent: "100", After: "2500ms"}})),
)

// together is some of everything.
var together = bout{"together", faultKinds, harm(
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

// harm names rules, and gives them seeds of their own.
func harm(rules ...meshv1alpha1.HTTPFaultInjection) []meshv1alpha1.HTTPFaultInjection {
	for i := range rules {
		rules[i].Name, rules[i].Seed = fmt.Sprintf("rule-%d", i), new(int64(i+1))
	}
	return rules
}

// few has a rule harm so many requests of each pod, and no more.
func few(n int64, rule meshv1alpha1.HTTPFaultInjection) meshv1alpha1.HTTPFaultInjection {
	rule.Count = &n
	return rule
}

// ofTallies matches what the operator asks of its objects, by verbs; without any, all.
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
