package undivided

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/sample"
)

// wrote is a member that wrote Secrets in some namespaces.
func wrote(shard string, writes uint64, namespaces ...string) Member {
	a := &meshv1.ResourceActivity{Resource: "secrets", Writes: writes}
	for _, ns := range namespaces {
		a.Keys = sample.Merge(a.Keys, []uint64{sample.Key(ns, "")})
	}
	return Member{shard, []*meshv1.ResourceActivity{a}}
}

func watching(m Member) Member {
	m.Activity[0].Watched = true
	return m
}

func TestResourcesThatTwoShardsWriteAreFound(t *testing.T) {
	exist := []string{"c", "b", "a"}
	for _, q := range []struct {
		name    string
		members []Member
		want    *v1alpha1.UndividedResource
	}{
		{"same namespaces", []Member{wrote("s1", 5, "a", "b"), wrote("s0", 4, "b", "a", "c")},
			&v1alpha1.UndividedResource{Resource: "secrets", Shards: []string{"s0", "s1"}, Writes: 9, Common: 2, Namespaces: []string{"a", "b"}}},
		{"namespace that was deleted", []Member{wrote("s0", 3, "gone"), wrote("s1", 3, "gone")},
			&v1alpha1.UndividedResource{Resource: "secrets", Shards: []string{"s0", "s1"}, Writes: 6, Common: 1}},
		{"other namespaces", []Member{wrote("s0", 9, "a"), wrote("s1", 9, "b")}, nil},
		{"one shard alone", []Member{wrote("s0", 9, "a")}, nil},
		{"two members of one shard", []Member{wrote("s0", 9, "a"), wrote("s0", 9, "a")}, nil},
		{"written once at the start", []Member{wrote("s0", 9, "a"), wrote("s1", minWrites-1, "a")}, nil},
		{"members add up", []Member{wrote("s0", 9, "a"), wrote("s1", minWrites-1, "b"), wrote("s1", 1, "a")},
			&v1alpha1.UndividedResource{Resource: "secrets", Shards: []string{"s0", "s1"}, Writes: 12, Common: 1, Namespaces: []string{"a"}}},
		{"watched by both", []Member{watching(wrote("s0", 9, "a")), watching(wrote("s1", 9, "b"))},
			&v1alpha1.UndividedResource{Resource: "secrets", Shards: []string{"s0", "s1"}, Writes: 18}},
		{"watched by one", []Member{watching(wrote("s0", 9, "a")), wrote("s1", 9, "b")}, nil},
		{"watched by both and written by one", []Member{watching(wrote("s0", 9, "a")), watching(wrote("s1", 0))}, nil},
	} {
		t.Run(q.name, func(t *testing.T) {
			got := Compare(q.members, exist)
			require.Empty(t, got.Foreign)
			if q.want == nil {
				require.Empty(t, got.Undivided)
				return
			}
			require.Equal(t, []v1alpha1.UndividedResource{*q.want}, got.Undivided)
		})
	}
}

func TestForeignWritesAreSummedByResource(t *testing.T) {
	member := func(shard string, foreign uint64) Member {
		return Member{shard, []*meshv1.ResourceActivity{{Resource: "pods", Divided: true, Writes: 100, ForeignWrites: foreign}}}
	}
	got := Compare([]Member{member("s1", 2), member("s0", 3), member("s2", 0)}, nil)
	require.Empty(t, got.Undivided, "a divided resource")
	require.Equal(t, []v1alpha1.ForeignWrites{{Resource: "pods", Shards: []string{"s0", "s1"}, Writes: 5}}, got.Foreign)
}

// A pod can write as many kinds, in as many namespaces, as its account may.
func TestResultIsBounded(t *testing.T) {
	var members []Member
	var exist []string
	for i := range 100 {
		exist = append(exist, fmt.Sprintf("ns-%d", i))
	}
	for m := range 8 {
		for i := range 40 {
			one := wrote(fmt.Sprintf("s%d", m%2), 9, exist...)
			one.Activity[0].Resource = fmt.Sprintf("kind-%d-%d", m/2, i)
			if i > 0 {
				one.Activity[0].Keys = nil
				one = watching(one)
			}
			foreign := &meshv1.ResourceActivity{Resource: one.Activity[0].Resource, Divided: true, Writes: 1, ForeignWrites: 1}
			one.Activity = append(one.Activity, foreign)
			members = append(members, one)
		}
	}
	got := Compare(members, exist)
	require.Len(t, got.Undivided, maxResources)
	require.Len(t, got.Foreign, maxResources)
	for i, u := range got.Undivided {
		require.Equal(t, i < 4, u.Common > 0, "the evidence of writes comes first: %v", u)
		require.LessOrEqual(t, len(u.Namespaces), maxNamespaces)
	}
}

// Each change of the status is a write.
func TestNumbersAloneAreRefreshedSeldom(t *testing.T) {
	now := time.Now()
	var tr Tracker
	compare := func(writes uint64, resource string) Result {
		a, b := wrote("s0", writes, "a"), wrote("s1", writes, "a")
		a.Activity[0].Resource, b.Activity[0].Resource = resource, resource
		return Compare([]Member{a, b}, nil)
	}
	tr.Round(compare(5, "secrets"), now)
	require.EqualValues(t, 10, tr.Undivided[0].Writes)
	tr.Round(compare(6, "secrets"), now.Add(refresh-1))
	require.EqualValues(t, 10, tr.Undivided[0].Writes)
	tr.Round(compare(7, "secrets"), now.Add(refresh))
	require.EqualValues(t, 14, tr.Undivided[0].Writes)
	tr.Round(compare(8, "services"), now.Add(refresh+1))
	require.EqualValues(t, 16, tr.Undivided[0].Writes, "another resource")
	tr.Round(Result{}, now.Add(refresh+2))
	require.Empty(t, tr.Undivided)
}
