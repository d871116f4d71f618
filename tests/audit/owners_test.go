package audit

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
)

var root = types.NamespacedName{Namespace: "operator", Name: "root"}

func at(ms int) time.Time { return start.Add(time.Duration(ms) * time.Millisecond) }

// wrote is a line of an audit log: a state of the root. Each holder is "shard:namespace,...".
func wrote(t *testing.T, version, received, ended int, moves []meshv1alpha1.HandoverStatus, holders ...string) string {
	t.Helper()
	status := &meshv1alpha1.RootStatus{Handovers: moves}
	for _, h := range holders {
		name, keys, _ := strings.Cut(h, ":")
		shard := meshv1alpha1.ShardStatus{Name: name}
		if keys != "" {
			shard.Held = sharding.Keys(strings.Split(keys, ",")...).Strings()
		}
		status.Shards = append(status.Shards, shard)
		status.Assignments = append(status.Assignments, meshv1alpha1.Assignment{UID: "uid-" + name, Name: "pod-" + name, Shard: name})
	}
	body, err := json.Marshal(&meshv1alpha1.ShardingConfig{
		ObjectMeta: metav1.ObjectMeta{Namespace: root.Namespace, Name: root.Name, ResourceVersion: fmt.Sprint(version)},
		Status:     meshv1alpha1.ShardingConfigStatus{Root: status},
	})
	require.NoError(t, err)
	return logLine(t, auditv1.Event{
		AuditID: types.UID(fmt.Sprintf("state-%d", version)), Verb: "update",
		ObjectRef:      &auditv1.ObjectReference{APIGroup: meshv1alpha1.GroupName, Resource: "shardingconfigs", Namespace: root.Namespace, Name: root.Name, Subresource: "status"},
		ResponseObject: &runtime.Unknown{Raw: body, ContentType: runtime.ContentTypeJSON},
	}, received, ended)
}

func logLine(t *testing.T, e auditv1.Event, received, ended int) string {
	t.Helper()
	e.Stage = auditv1.StageResponseComplete
	e.ResponseStatus = &metav1.Status{Code: 200}
	e.RequestReceivedTimestamp, e.StageTimestamp = metav1.NewMicroTime(at(received)), metav1.NewMicroTime(at(ended))
	line, err := json.Marshal(e)
	require.NoError(t, err)
	return string(line)
}

func states(t *testing.T, lines ...string) []State {
	t.Helper()
	out, err := States(strings.NewReader(strings.Join(lines, "\n")+"\n"), root, start)
	require.NoError(t, err)
	require.Len(t, out, len(lines))
	return out
}

// write returns a write of a shard's pod; it has no end if that is 0.
func write(shard, namespace string, received, ended int) Request {
	r := Request{
		ID: fmt.Sprintf("%s-%s-%d", shard, namespace, received), PodUID: "uid-" + shard, Verb: "update", Namespace: namespace,
		Group: "tally.example.com", Resource: "tallies", Received: at(received),
	}
	if ended > 0 {
		r.Ended = at(ended)
	}
	return r
}

func foreign(j Findings) (out []string) {
	for _, f := range j.Foreign {
		out = append(out, f.ID)
	}
	return out
}

// a gives n to b: released at 200, granted at 300; back at 500 and 600.
func thereAndBack(t *testing.T) []State {
	return states(t,
		wrote(t, 1, 90, 100, nil, "a:n,m", "b:o"),
		wrote(t, 2, 200, 210, nil, "a:m", "b:o"),
		wrote(t, 3, 290, 300, nil, "a:m", "b:o,n"),
		wrote(t, 4, 500, 510, nil, "a:m", "b:o"),
		wrote(t, 5, 590, 600, nil, "a:m,n", "b:o"),
	)
}

func TestForeignWritesAreFound(t *testing.T) {
	for _, c := range []struct {
		name   string
		writes []Request
		want   []string // ids of the foreign ones
	}{
		{"each in its time", []Request{
			write("a", "n", 110, 120), write("a", "n", 150, 199), write("b", "n", 301, 310), write("b", "n", 480, 499), write("a", "n", 601, 700),
			write("a", "m", 205, 295), write("b", "o", 205, 595),
		}, nil},
		{"at the very edges", []Request{write("a", "n", 100, 200), write("b", "n", 300, 500), write("a", "n", 600, 600)}, nil},
		{"over the edges", []Request{
			write("a", "n", 99, 120), write("a", "n", 190, 201), write("b", "n", 299, 310), write("b", "n", 499, 501), write("a", "n", 599, 601),
		}, []string{"a-n-99", "a-n-190", "b-n-299", "b-n-499", "a-n-599"}},
		{"between two owners", []Request{write("a", "n", 220, 230), write("b", "n", 240, 250)}, []string{"a-n-220", "b-n-240"}},
		{"on both sides of another's time", []Request{write("a", "n", 150, 650)}, []string{"a-n-150"}},
		{"in turns", []Request{write("a", "n", 110, 120), write("b", "n", 310, 320), write("a", "n", 330, 340), write("b", "n", 350, 360)}, []string{"a-n-330"}},
		{"a namespace without an owner", []Request{write("a", "x", 110, 120)}, []string{"a-x-110"}},
		{"without an end", []Request{write("a", "n", 199, 0), write("a", "n", 201, 0)}, []string{"a-n-201"}},
		{"before anything was owned", []Request{write("a", "n", 10, 20)}, []string{"a-n-10"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			j := Check(thereAndBack(t), c.writes, nil)
			require.Equal(t, c.want, foreign(j))
			require.Equal(t, len(c.writes), j.Writes)
			require.Empty(t, j.Unknown)
			require.Empty(t, j.Shared)
		})
	}
	require.Equal(t, "b", Check(thereAndBack(t), []Request{write("a", "n", 330, 340)}, nil).Foreign[0].Owner)
}

// Writes by pods without a shard are reported.
func TestWritesByPodsWithoutShardAreReported(t *testing.T) {
	stranger, nobody := write("c", "n", 110, 120), write("a", "n", 130, 140)
	nobody.PodUID = "" // a token without a pod
	j := Check(thereAndBack(t), []Request{stranger, nobody, write("a", "n", 110, 120)}, nil)
	require.Equal(t, []Request{stranger, nobody}, j.Unknown)
	require.Empty(t, j.Foreign)
	require.Len(t, Check(nil, []Request{stranger}, nil).Unknown, 1)
}

func TestStatesThatShareKeysAreReported(t *testing.T) {
	j := Check(states(t, wrote(t, 1, 90, 100, nil, "a:n,m", "b:m,o", "c:")), nil, nil)
	require.Len(t, j.Shared, 1)
	require.Contains(t, j.Shared[0], "a and b")
}

// A restart of the apiserver may hide the state that gave b its keys. It excuses writes of b,
// but not writes of both shards, nor a state that is missing at another time.
func TestRestartHidesOneStateOnly(t *testing.T) {
	history := states(t, wrote(t, 1, 90, 100, nil, "a:n", "b:o"), wrote(t, 5, 490, 500, nil, "a:", "b:o,n"))
	early := []Request{write("a", "n", 110, 120), write("b", "n", 310, 320)}
	restart := []time.Time{at(200)}
	require.Empty(t, foreign(Check(history, early, restart)))
	require.Equal(t, []string{"b-n-310"}, foreign(Check(history, early, nil)))
	require.Equal(t, []string{"b-n-310"}, foreign(Check(history, early, []time.Time{at(50), at(600)})))
	require.Equal(t, []string{"b-n-310"}, foreign(Check(history, append(early, write("a", "n", 330, 340)), restart)), "in turns")
}

func TestOnlySettledMovesBetweenShardsAreHandovers(t *testing.T) {
	move := func(from, to, phase string, keys ...string) meshv1alpha1.HandoverStatus {
		return meshv1alpha1.HandoverStatus{From: from, To: to, Phase: phase, Keys: sharding.Keys(keys...).Strings()}
	}
	moves := func(all ...meshv1alpha1.HandoverStatus) []meshv1alpha1.HandoverStatus { return all }
	got := Handovers(states(t,
		wrote(t, 1, 90, 100, nil, "a:n,m,x", "b:o"),
		wrote(t, 2, 200, 210, moves(move("a", "b", "Releasing", "n"), move("a", "b", "Releasing", "x"), move("", "a", "Granting", "y")), "a:n,m,x,y", "b:o"),
		wrote(t, 3, 290, 300, moves(move("a", "b", "Granting", "n"), move("a", "b", "Releasing", "x")), "a:m,x,y", "b:o,n"),
		wrote(t, 4, 400, 410, nil, "a:m,x,y", "b:o,n"), // x stays, after all
		wrote(t, 5, 500, 510, moves(move("b", "a", "Granting", "o")), "a:m,x,y,o", "b:n"),
	))
	require.Len(t, got, 1)
	require.Equal(t, "a to b", got[0].From+" to "+got[0].To)
	require.True(t, got[0].Began.Equal(at(200)))
	require.Equal(t, 210*time.Millisecond, got[0].Took())
}

// From a log with other events, States returns those of the root in the order of their
// versions, and Requests the writes with their resources.
func TestStatesAndWritesOfLog(t *testing.T) {
	other := strings.ReplaceAll(wrote(t, 2, 150, 160, nil, "z:n"), `"root"`, `"other"`)
	refused := strings.Replace(wrote(t, 4, 150, 160, nil, "z:n"), `"code":200`, `"code":409`, 1)
	lease := auditv1.Event{AuditID: "w", Verb: "update", User: authenticationv1.UserInfo{
		Username: ServiceAccount("operator", "tally"),
		Extra:    map[string]authenticationv1.ExtraValue{podClaim: {"pod-a"}, podUIDClaim: {"uid-a"}},
	}, ObjectRef: &auditv1.ObjectReference{APIGroup: "coordination.k8s.io", Resource: "leases", Namespace: "operator", Name: "shardingconfigs"}}
	log := strings.Join([]string{
		wrote(t, 3, 200, 210, nil, "a:m"), wrote(t, 1, 90, 100, nil, "a:n"), wrote(t, 1, -90, -80, nil, "a:old"), other, refused, logLine(t, lease, 120, 130), "{unfinished",
	}, "\n")

	got, err := States(strings.NewReader(log), root, start)
	require.NoError(t, err)
	require.Len(t, got, 2)
	require.Equal(t, "a", got[0].Owner("n"))
	require.Empty(t, got[1].Owner("n"))
	require.True(t, slices.IsSortedFunc(got, func(a, b State) int { return a.Received.Compare(b.Received) }))

	requests, err := Requests(strings.NewReader(log), Callers{Users: []string{ServiceAccount("operator", "tally")}})
	require.NoError(t, err)
	require.Len(t, requests, 1)
	require.Equal(t, []string{"uid-a", "coordination.k8s.io", "leases", "operator"},
		[]string{requests[0].PodUID, requests[0].Group, requests[0].Resource, requests[0].Namespace})
	require.True(t, requests[0].Writes())
	require.False(t, Request{Verb: "watch"}.Writes())

	_, err = States(strings.NewReader("\"shardingconfigs\" \"responseObject\"\n"), root, start)
	require.ErrorContains(t, err, "line 1")
}
