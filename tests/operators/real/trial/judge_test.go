package trial

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/tests/audit"
)

// recorded reads the states and writes of testdata/audit.log: a pod outside the mesh writes in
// amber and birch, shards a and b are then granted one namespace each, their members write, and
// the namespaces are released one by one before another pod outside writes.
func recorded(t *testing.T) ([]audit.State, []audit.Request) {
	t.Helper()
	text, err := os.ReadFile("testdata/audit.log")
	require.NoError(t, err)
	states, err := audit.States(strings.NewReader(string(text)), types.NamespacedName{Namespace: "operators-demo", Name: rootName}, time.Time{})
	require.NoError(t, err)
	requests, err := audit.Requests(strings.NewReader(string(text)), audit.Callers{Users: []string{audit.ServiceAccount("operators-demo", "operator")}})
	require.NoError(t, err)
	return states, requests
}

func TestJudgeAcceptsOneOwnerAtATime(t *testing.T) {
	states, writes := recorded(t)
	require.Len(t, states, 4)
	v := judge(states, writes)
	require.Empty(t, v.twoOwners)
	require.Equal(t, 6, v.writes)
	require.Equal(t, 4, v.outside, "by the pods before and after the mesh")
}

// A write is added to the recorded ones that only a second owner can have made.
func TestJudgeFindsSecondOwners(t *testing.T) {
	for name, test := range map[string]struct {
		at, took time.Duration // since the first event
		pod      string
		want     string
	}{
		"outside while a shard holds":  {at: 25 * time.Second, pod: "outside-before", want: "outside the mesh, while"},
		"outside until a shard holds":  {at: 9 * time.Second, took: 8 * time.Second, pod: "outside-before", want: "outside the mesh, while"},
		"shard that does not hold":     {at: 25 * time.Second, pod: "uid-b", want: "wrote in amber"},
		"member before it is granted":  {at: 5 * time.Second, pod: "uid-a", want: "wrote in amber"},
		"member after it has released": {at: 44 * time.Second, pod: "uid-a", want: "wrote in amber"},
		"two pods outside by turns":    {at: 1500 * time.Millisecond, pod: "another", want: "two pods by turns"},
	} {
		t.Run(name, func(t *testing.T) {
			states, writes := recorded(t)
			w := writes[0]
			start := w.Received
			w.ID, w.PodUID, w.Received = "added", test.pod, start.Add(test.at)
			w.Ended = w.Received.Add(test.took + 10*time.Millisecond)
			v := judge(states, append(writes, w))
			require.NotEmpty(t, v.twoOwners)
			require.Contains(t, strings.Join(v.twoOwners, "\n"), test.want)
		})
	}
}

// A root that was disabled leaves its members without shards: any of them may lead then.
func TestJudgeAcceptsMembersAfterRemoval(t *testing.T) {
	states, writes := recorded(t)
	w := writes[0]
	w.ID, w.PodUID, w.Received = "added", "uid-a", w.Received.Add(55*time.Second)
	w.Ended = w.Received.Add(10 * time.Millisecond)
	require.Empty(t, judge(states, append(writes, w)).twoOwners)
}

func TestJudgeFindsWritesAtOnce(t *testing.T) {
	states, writes := recorded(t)
	w := writes[0]
	w.ID, w.PodUID = "added", "another"
	w.Received, w.Ended = w.Received.Add(time.Millisecond), w.Ended.Add(time.Millisecond)
	require.Contains(t, strings.Join(judge(states, append(writes, w)).twoOwners, "\n"), "two pods at once in amber")
}

// A trial is for divided objects of the adopted namespaces.
func TestOnlyDividedWritesAreJudged(t *testing.T) {
	tr := &trial{Built: &Built{Operator: sourceController()}}
	write := audit.Request{Verb: "update", Group: "source.toolkit.fluxcd.io", Resource: "helmrepositories", Namespace: "amber-" + adoptedSet}
	require.True(t, tr.judged(write))
	for name, edit := range map[string]func(*audit.Request){
		"read":           func(r *audit.Request) { r.Verb = "get" },
		"other resource": func(r *audit.Request) { r.Resource = "events" },
		"other group":    func(r *audit.Request) { r.Group = "" },
		"reference set":  func(r *audit.Request) { r.Namespace = "amber-" + referenceSet },
		"own namespace":  func(r *audit.Request) { r.Namespace = "operators-source-controller" },
	} {
		other := write
		edit(&other)
		require.False(t, tr.judged(other), name)
	}
}
