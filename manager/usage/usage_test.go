package usage

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
)

var now = time.UnixMilli(1_000_000_000)

// pod returns the usage of a pod whose last request is some time ago.
func pod(uid string, since int64, ago time.Duration) *meshv1.PodUsage {
	return &meshv1.PodUsage{Uid: uid, Name: uid, Usage: &meshv1.Usage{SinceMs: since, LastMs: now.Add(-ago).UnixMilli(), Requests: 1}}
}

func TestUsageSurvivesAConfigMap(t *testing.T) {
	key := Key(layout.Workload{Kind: layout.Deployment, Name: "op"})
	require.Equal(t, "deployment.op", key)
	r := Record{}
	r.Update(key, pod("a", 1, time.Hour))
	r.Update(key, pod("b", 1, time.Minute))
	r.Update(key, pod("a", 2, time.Second)) // by another agent
	r.Update(key, pod("b", 1, 0))
	r.Prune(now)
	data, err := r.Encode()
	require.NoError(t, err)
	got := Decode(data)
	require.True(t, r.Equal(got))
	var order []string
	for _, p := range got[key].GetPods() {
		order = append(order, fmt.Sprintf("%s since %d", p.GetUid(), p.GetUsage().GetSinceMs()))
	}
	require.Equal(t, []string{"b since 1", "a since 2", "a since 1"}, order)

	got.Update(key, pod("b", 1, -time.Second))
	require.False(t, r.Equal(got))
	got["deployment.other"] = &meshv1.WorkloadUsage{}
	require.False(t, r.Equal(got))
}

func TestOldUsageIsRemoved(t *testing.T) {
	r := Record{}
	r.Update("deployment.old", pod("a", 1, Keep+time.Second))
	r.Update("deployment.op", pod("b", 1, Keep+time.Second))
	r.Update("deployment.op", pod("c", 1, Keep))
	r.Prune(now)
	require.Len(t, r, 1)
	require.Len(t, r["deployment.op"].GetPods(), 1)
}

// Tenants may write anything there.
func TestRecordsAreBounded(t *testing.T) {
	r := Record{}
	for i := range 100 {
		key := fmt.Sprintf("deployment.op-%03d", i)
		for j := range 20 {
			r.Update(key, pod(fmt.Sprint(j), 1, time.Duration(i+j)*time.Second))
		}
	}
	r.Prune(now)
	require.Len(t, r, maxWorkloads)
	require.Len(t, r["deployment.op-000"].GetPods(), maxPods)
	require.Equal(t, "0", r["deployment.op-000"].GetPods()[0].GetUid(), "the latest")

	large := pod("large", 1, time.Minute)
	large.Name = strings.Repeat("a", maxBytes) // of no real pod
	r = Record{}
	r.Update("deployment.op", large)
	r.Update("deployment.op", pod("small", 1, 0))
	r.Prune(now)
	data, err := r.Encode()
	require.NoError(t, err)
	require.Less(t, len(data["deployment.op"]), maxBytes)
	require.Contains(t, data["deployment.op"], "small")

	require.Empty(t, Decode(map[string]string{"a": "{", "b": `{"pods": 1}`, "c": strings.Repeat(" ", maxBytes) + "{}"}))
	require.Empty(t, Decode(map[string]string{"a": `{"pods": [{}, {"uid": "a", "name": "a\u001b[2J", "usage": {}}]}`})["a"].GetPods())
	one := `{"uid": "a", "name": "a", "usage": {}}`
	require.Len(t, Decode(map[string]string{"a": `{"pods": [` + strings.Repeat(one+",", 50) + one + `]}`})["a"].GetPods(), maxPods)
	require.Len(t, Decode(map[string]string{"a": `{"later": true}`}), 1)
}

// The plugin reads what tenants may write, and prints it.
func FuzzDecode(f *testing.F) {
	f.Add(`{"pods": [{"uid": "a", "name": "a", "usage": {"requests": "3", "resources": [{"resource": "pods", "namespaces": [{"namespace": "a", "writes": "1"}], "objects": [{"namespace": "a", "name": "b"}]}]}}]}`)
	f.Add(`{"pods": [{"usage": {"lastMs": "9223372036854775807"}}]}`)
	f.Fuzz(func(t *testing.T, text string) {
		r := Decode(map[string]string{"a": text})
		r.Prune(now)
		data, err := r.Encode()
		require.NoError(t, err)
		again := Decode(data)
		again.Prune(now)
		require.True(t, r.Equal(again), "%s", data)
		for _, of := range r {
			for _, p := range of.GetPods() {
				for _, u := range p.GetUsage().GetResources() {
					for _, o := range u.GetObjects() {
						require.Equal(t, strings.ToValidUTF8(o.GetName(), ""), o.GetName())
						require.NotContains(t, o.GetName(), "\x1b")
					}
				}
			}
		}
	})
}
