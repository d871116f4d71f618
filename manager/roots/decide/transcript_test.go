package decide

import (
	"cmp"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/manager/acting"
	"github.com/ctrlmesh/ctrlmesh/manager/handover"
	"github.com/ctrlmesh/ctrlmesh/manager/locks"
	"github.com/ctrlmesh/ctrlmesh/manager/push"
)

// TestTranscripts plays testdata/*.txt. Each command is `round [times=N]`. Its lines change what the
// leader of a root observes, and the answer is its decision, the last one of N. After each round
// agents apply what follows, and a second passes. `-rewrite` writes the answers anew.
//
//	root N                  a new root of N shards, and a pod for each
//	shards N                the spec asks for N shards
//	dry run                 the spec asks for a dry run
//	unknown MESSAGE         the apiserver does not serve a resource that the spec names
//	lock held|free          whether the mesh holds the operator's lock: held at first
//	demand N                the last demand of the lock, and
//	followed N              the one by which it is held: both 1 at first
//	lease DURATION          how long former leaders may go on with the locks of shards
//	slow|prompt POD         whether its agent applies what it is sent: prompt at first
//	deleted UID             a pod without a policy, on node-1, which may run on
//	exited UID              its agent has confirmed that it does not
//	leader                  another leader reads the state, and remembers nothing
//	wait DURATION           time passes
func TestTranscripts(t *testing.T) {
	datadriven.Walk(t, "testdata", func(t *testing.T, path string) {
		var w *world
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			require.Equal(t, "round", d.Cmd, d.Pos)
			for line := range strings.Lines(d.Input) {
				what, arg, _ := strings.Cut(strings.TrimSpace(line), " ")
				if what == "root" {
					w = newWorld(number(t, arg))
				} else {
					w.change(t, what, arg)
				}
			}
			times := 1
			d.MaybeScanArgs(t, "times", &times)
			for range times - 1 {
				w.round(t)
			}
			var b strings.Builder
			for _, lock := range Lingering(w.facts(), w.now) {
				fmt.Fprintf(&b, "  read the lease of %s\n", lock)
			}
			return b.String() + show(w.round(t))
		})
	})
}

// change changes what the leader observes.
func (w *world) change(t *testing.T, what, arg string) {
	switch what {
	case "shards":
		w.config.Spec.Root.Auto.ShardingSize = int32(number(t, arg))
		w.config.Generation++
	case "dry":
		w.asked = acting.Of(&w.config.Spec)
		w.asked.DryRun = true
	case "unknown":
		w.unknown = arg
	case "lock":
		w.lockFree = arg == "free"
	case "demand":
		w.demanded = uint64(number(t, arg))
	case "followed":
		w.followed = uint64(number(t, arg))
	case "slow", "prompt":
		w.slow[arg] = what == "slow"
	case "deleted":
		w.removed = append(w.removed, push.Removed{Node: "node-1", Namespace: "ns", UID: arg})
	case "exited":
		w.removed = slices.DeleteFunc(w.removed, func(r push.Removed) bool { return r.UID == arg })
	case "leader":
		var err error
		w.memory, w.stored.ReadAt = Memory{}, w.now
		w.stored.State, err = Load(w.stored.Status.Root)
		require.NoError(t, err)
	case "lease", "wait":
		d, err := time.ParseDuration(arg)
		require.NoError(t, err)
		if what == "lease" {
			w.lease = d
		} else {
			w.now = w.now.Add(d)
		}
	default:
		require.Fail(t, "unknown change", "%q", what)
	}
}

func number(t *testing.T, text string) int {
	n, err := strconv.Atoi(text)
	require.NoError(t, err)
	return n
}

// show returns what a decision does and what users see of it.
func show(d Decision) string {
	var b strings.Builder
	for _, e := range d.Effects {
		switch e := e.(type) {
		case handover.Resend:
			fmt.Fprintf(&b, "  resend %s\n", e.Shard)
		case handover.Released:
			fmt.Fprintf(&b, "  released %s\n", showMove(e.Move))
		case handover.Granted:
			fmt.Fprintf(&b, "  granted %s\n", showMove(e.Move))
		case handover.Settled:
			fmt.Fprintf(&b, "  settled %s\n", showMove(e.Move))
		}
	}
	for _, e := range d.Events {
		fmt.Fprintf(&b, "  event %s: %s\n", e.Reason, e.Note)
	}
	if d.Evict != nil {
		fmt.Fprintf(&b, "  evict %s: %s\n", d.Evict.Pod.Name, d.Evict.Why)
	}
	for _, name := range slices.Sorted(maps.Keys(d.State.Shards)) {
		fmt.Fprintf(&b, "%s owns %s, members", name, showScope(d.State.Shards[name].Owned))
		for _, uid := range slices.Sorted(maps.Keys(d.State.Members)) {
			if m := d.State.Members[uid]; m.Shard == name {
				fmt.Fprintf(&b, " %s", m.Name)
			}
		}
		b.WriteString("\n")
	}
	if d.Status.Root.Acting.DryRun {
		b.WriteString("shards act by the dry run\n")
	}
	fmt.Fprintf(&b, "locks: %s\n", [...]string{locks.Release: "release", locks.Watch: "watch", locks.Acquire: "acquire", locks.Keep: "keep"}[d.Demand.Mode])
	for _, c := range d.Status.Conditions {
		if c.Type == v1alpha1.ConditionReady || c.Status == metav1.ConditionTrue && c.Type != v1alpha1.ConditionProgressing {
			fmt.Fprintf(&b, "%s is %s, %s: %s\n", c.Type, c.Status, c.Reason, c.Message)
		}
	}
	return b.String()
}

func showMove(m handover.Move) string {
	return fmt.Sprintf("%s from %s to %s", showScope(m.Keys), cmp.Or(m.From, "nobody"), cmp.Or(m.To, "nobody"))
}

var digits = regexp.MustCompile(`([0-9a-f]{4})[0-9a-f]{12}`)

// showScope shows the first 4 digits of the bounds of ranges.
func showScope(s sharding.Scope) string {
	switch {
	case s.Empty():
		return "nothing"
	case s.Everything():
		return "everything"
	}
	return digits.ReplaceAllString(s.String(), "$1")
}
