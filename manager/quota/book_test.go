package quota

import (
	"testing"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
)

var cb = types.NamespacedName{Namespace: "ns", Name: "cb"}

// mesh is what pods were told, and which agents do not answer.
type mesh struct {
	*Book
	pods  map[string]bool // whether the CircuitBreaker selects them
	away  map[string]bool
	told  map[types.UID]compile.Policy
	force map[types.UID]compile.Policy
}

func newMesh(s v1alpha1.CircuitBreakerStatus) *mesh {
	m := &mesh{Book: &Book{}, pods: map[string]bool{}, away: map[string]bool{}, force: map[types.UID]compile.Policy{}}
	m.Open(cb, s)
	return m
}

// push tells all pods their policies, and lets the agents that answer apply them.
func (m *mesh) push() {
	m.told = map[types.UID]compile.Policy{}
	for pod, selected := range m.pods {
		uid := types.UID(pod)
		p := &meshv1.PodPolicy{Namespace: "ns", Name: pod, Workload: "w"}
		if selected {
			p.Traffic = &meshv1.Traffic{Breakers: []*meshv1.Breaker{{Name: "cb", Rules: []*meshv1.LimitRule{
				{Name: "own"}, {Name: "r", Share: m.Share(cb, "r", pod, uid)},
			}}}}
		}
		m.told[uid] = compile.Policy{Node: "n", PodPolicy: p}
		if !m.away[pod] {
			m.force[uid] = m.told[uid]
		}
	}
}

// round also records, if it is asked to.
func (m *mesh) round() bool {
	inForce := func(p compile.Policy) bool { return m.force[types.UID(p.Name)].PodPolicy == p.PodPolicy }
	tell, record := m.Round(m.told, inForce)
	if record {
		m.Recorded(cb, m.Record(cb))
	}
	return tell || record
}

func (m *mesh) settle(t *testing.T) map[string]string {
	for range 20 {
		if m.push(); !m.round() {
			out := map[string]string{}
			for pod := range m.pods {
				if s := m.force[types.UID(pod)].GetTraffic().GetBreakers(); s != nil {
					out[pod] = Share{s[0].Rules[1].Share.Index, s[0].Rules[1].Share.Of}.String()
				}
			}
			return out
		}
	}
	t.Fatal("it does not end")
	return nil
}

func TestBook(t *testing.T) {
	m := newMesh(v1alpha1.CircuitBreakerStatus{})
	m.pods["a"], m.pods["b"] = true, true
	require.Equal(t, map[string]string{"a": "1/2", "b": "2/2"}, m.settle(t))
	require.Equal(t, Record{"r": {"a": {0, 2}, "b": {1, 2}}}, m.Record(cb))

	// One does not answer: who comes waits.
	m.away["b"], m.pods["c"] = true, true
	require.Equal(t, map[string]string{"a": "1/3", "b": "2/2", "c": "-"}, m.settle(t))
	delete(m.away, "b")
	require.Equal(t, map[string]string{"a": "1/3", "b": "2/3", "c": "3/3"}, m.settle(t))

	// One is selected no more, but its agent does not answer: it keeps its share.
	m.away["b"], m.pods["b"] = true, false
	require.Equal(t, map[string]string{"a": "1/3", "b": "2/3", "c": "3/3"}, m.settle(t))
	require.Equal(t, Share{1, 3}, m.Record(cb)["r"]["b"])
	m.Recorded(cb, m.Record(cb))
	delete(m.away, "b")
	require.Equal(t, map[string]string{"a": "1/2", "c": "2/2"}, m.settle(t))

	// One is gone.
	delete(m.pods, "a")
	require.Equal(t, map[string]string{"c": "1/1"}, m.settle(t))
	delete(m.pods, "c")
	m.settle(t)
	m.Close(func(types.NamespacedName) bool { return true })
	require.True(t, m.Has(cb))
	m.Close(func(types.NamespacedName) bool { return false })
	require.False(t, m.Has(cb))
}

// A new leader tells what is on record, and goes on from there.
func TestANewLeader(t *testing.T) {
	target := func(pod, share string) v1alpha1.TargetStatus {
		return v1alpha1.TargetStatus{PodName: pod, LimitingSnapshots: []v1alpha1.LimitingSnapshot{{Name: "own"}, {Name: "r", Share: share}}}
	}
	m := newMesh(v1alpha1.CircuitBreakerStatus{TargetStatus: []v1alpha1.TargetStatus{target("a", "1/3"), target("b", "2/3"), target("c", "-"), target("d", "3/3"), target("gone", "3/3")}})
	m.pods["a"], m.pods["b"], m.pods["c"], m.pods["d"] = true, true, true, false
	m.away["b"], m.away["d"] = true, true
	require.Equal(t, &meshv1.Share{Index: 1, Of: 3}, m.Share(cb, "r", "b", "b"))
	require.Equal(t, map[string]string{"a": "1/4", "c": "-"}, m.settle(t))
	delete(m.away, "d") // it is not selected any more
	require.Equal(t, map[string]string{"a": "1/3", "c": "3/3"}, m.settle(t), "b has what it had")
	delete(m.away, "b")
	require.Equal(t, map[string]string{"a": "1/3", "b": "2/3", "c": "3/3"}, m.settle(t))
}

// Until it is recorded what a pod may have, it is not told.
func TestFirstRecordThenTell(t *testing.T) {
	m := newMesh(v1alpha1.CircuitBreakerStatus{})
	m.pods["a"] = true
	for range 3 {
		m.push()
		_, record := m.Round(m.told, func(compile.Policy) bool { return true })
		require.True(t, record)
		require.True(t, m.Unrecorded(cb))
		require.Zero(t, m.Share(cb, "r", "a", "a").Of)
	}
	m.Recorded(cb, m.Record(cb))
	require.False(t, m.Unrecorded(cb))
	require.Equal(t, map[string]string{"a": "1/1"}, m.settle(t))

	// While a lesser one is being recorded, the greater that is on record is not told.
	m.pods["b"] = true
	require.Equal(t, map[string]string{"a": "1/2", "b": "2/2"}, m.settle(t))
	m.Record(cb)
	delete(m.pods, "b")
	m.push()
	m.Round(m.told, func(compile.Policy) bool { return true })
	require.EqualValues(t, 2, m.Share(cb, "r", "a", "a").Of)
}
