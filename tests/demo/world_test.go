package main

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/tests/audit"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
	tallyv1 "github.com/ctrlmesh/ctrlmesh/tests/operators/tally/v1"
)

var now = time.Date(2026, 11, 20, 10, 0, 0, 0, time.UTC)

// good returns a world without failures: two shards of two namespaces each, two objects in
// each namespace.
func good() *world {
	w := &world{now: now, traffic: &kube.Traffic{Requests: make([]audit.Request, 9), Lines: 9}}
	w.root.Name, w.root.Status.Root = workload, &meshv1alpha1.RootStatus{}
	for i := range shards {
		pod := fmt.Sprintf("tally-%d", i)
		namespaces := []string{fmt.Sprintf("demo-%02d", 2*i), fmt.Sprintf("demo-%02d", 2*i+1)}
		c := &meshv1alpha1.ShardingConfig{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("tally-%d-normal", i+1)}}
		c.Status.Held = sharding.Keys(namespaces...).Strings()
		c.Status.Pods = []meshv1alpha1.MemberStatus{{Name: pod, Capture: "ebpf"}}
		w.shards = append(w.shards, *c)
		w.root.Status.Root.Assignments = append(w.root.Status.Root.Assignments, meshv1alpha1.Assignment{UID: "uid-" + pod, Name: pod, Shard: c.Name})
		w.pods = append(w.pods, corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: pod, UID: types.UID("uid-" + pod)},
			Spec:       corev1.PodSpec{NodeName: fmt.Sprintf("node%d", i+1)},
			Status: corev1.PodStatus{Phase: corev1.PodRunning, Conditions: []corev1.PodCondition{
				{Type: corev1.PodReady, Status: corev1.ConditionTrue},
			}},
		})
		w.leases = append(w.leases, coordinationv1.Lease{
			ObjectMeta: metav1.ObjectMeta{Name: lockOf(c)},
			Spec: coordinationv1.LeaseSpec{
				HolderIdentity:       new(pod + "_0d4e7c1a"),
				LeaseDurationSeconds: new(int32(15)),
				RenewTime:            &metav1.MicroTime{Time: now.Add(-2 * time.Second)},
			},
		})
		for _, ns := range namespaces {
			for j := range 2 {
				t := tallyv1.Tally{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: fmt.Sprintf("t-%02d", j), Generation: 1}}
				t.Record(pod)
				w.tallies = append(w.tallies, t)
			}
		}
	}
	return w
}

// allGood are the counts of good.
var allGood = counts{Shards: 2, Namespaces: 4, Objects: 8, Leaders: 2}

func TestCountsWithoutFailures(t *testing.T) {
	w := good()
	require.Equal(t, allGood, w.count())
	require.Empty(t, w.doubts())
	require.Equal(t, "demo: shards=2 namespaces=4 objects=8 missing=0 overlap=0 leaders=2 leaked=0", w.count().String())

	var out bytes.Buffer
	printTable(&out, w.rows())
	require.Equal(t, strings.TrimLeft(`
ROOT    SHARD            OWNS           POD       NODE    CAPTURE   LEADS                           RECONCILED               OBJECTS
tally   tally-1-normal   2 namespaces   tally-0   node1   ebpf      tally-leader---tally-1-normal   2 (demo-00 to demo-01)   4
tally   tally-2-normal   2 namespaces   tally-1   node2   ebpf      tally-leader---tally-2-normal   2 (demo-02 to demo-03)   4
`, "\n"), out.String())
}

// Every failure shows, each in its own number.
func TestCountsOfFailures(t *testing.T) {
	tests := map[string]struct {
		spoil func(*world)
		want  func(*counts)
		doubt string
	}{
		"an object that no pod reconciled": {
			spoil: func(w *world) { w.tallies[0].Status = tallyv1.TallyStatus{} },
			want:  func(c *counts) { c.Missing = 1 },
		},
		"an object whose change no pod reconciled": {
			spoil: func(w *world) { w.tallies[0].Generation++ },
			want:  func(c *counts) { c.Missing = 1 },
		},
		"an object both reconciled": {
			spoil: func(w *world) { w.tallies[0].Record("tally-1") },
			want:  func(c *counts) { c.Overlap = 1 },
			doubt: "1 objects were reconciled by a pod of another shard, such as demo-00/t-00 by tally-1",
		},
		"an object that two pods wrote in turns": {
			spoil: func(w *world) {
				for _, pod := range []string{"outside", "uid-tally-0", "outside"} {
					w.requests = append(w.requests, audit.Request{Verb: "update", Resource: "tallies", Namespace: "demo-00", PodUID: pod, Code: 200,
						URI: "/apis/tally.example.com/v1/namespaces/demo-00/tallies/t-00/status", Received: now.Add(time.Duration(len(w.requests)) * time.Second)})
				}
			},
			want: func(c *counts) { c.Overlap = 1 },
		},
		"shards that swapped their objects": {
			spoil: func(w *world) {
				w.shards[0].Status.Held, w.shards[1].Status.Held = w.shards[1].Status.Held, w.shards[0].Status.Held
			},
			want:  func(*counts) {},
			doubt: "8 objects were reconciled by a pod of another shard",
		},
		"objects that were never made": {
			spoil: func(w *world) { w.tallies = w.tallies[:5] },
			want:  func(c *counts) { c.Objects, c.Namespaces = 5, 3 },
		},
		"a member that is not captured": {
			spoil: func(w *world) { w.shards[0].Status.Pods[0].Capture = "" },
			want:  func(c *counts) { c.Shards = 1 },
		},
		"a shard without a running member": {
			spoil: func(w *world) { w.pods[1].DeletionTimestamp = &metav1.Time{Time: now} },
			want:  func(c *counts) { c.Shards, c.Leaders = 1, 1 },
		},
		"a lock held by the other shard's pod": {
			spoil: func(w *world) { w.leases[0].Spec.HolderIdentity = new("tally-1_0d4e7c1a") },
			want:  func(c *counts) { c.Leaders = 1 },
		},
		"a lock that is not renewed": {
			spoil: func(w *world) { w.leases[1].Spec.RenewTime.Time = now.Add(-16 * time.Second) },
			want:  func(c *counts) { c.Leaders = 1 },
		},
		"a lock under the name that the operator asked for": {
			spoil: func(w *world) { w.leases[0].Name = lock },
			want:  func(c *counts) { c.Leaders = 1 },
		},
		"a request that bypassed the mesh": {
			spoil: func(w *world) { w.traffic.Leaked = []audit.Request{{ID: "id-1", URI: "/api"}} },
			want:  func(c *counts) { c.Leaked = 1 },
			doubt: "leaked: ",
		},
		"an audit log without requests": {
			spoil: func(w *world) { w.traffic.Requests = nil },
			want:  func(*counts) {},
			doubt: "leaked counts nothing",
		},
		"no mesh at all": {
			spoil: func(w *world) { w.shards = nil },
			want:  func(c *counts) { c.Shards, c.Leaders = 0, 0 },
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			w, want := good(), allGood
			test.spoil(w)
			test.want(&want)
			require.Equal(t, want, w.count())
			doubts := strings.Join(w.doubts(), "\n")
			if test.doubt == "" {
				require.Empty(t, doubts)
			}
			require.Contains(t, doubts, test.doubt)
			require.NotPanics(t, func() { w.rows() })
			require.False(t, want == allGood && doubts == "", "the failure does not show")
		})
	}
}
