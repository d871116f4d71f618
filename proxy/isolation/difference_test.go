package isolation

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/proxy/filter"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
)

var watchedPods = match.Kind{Verb: "watch", Resource: "pods"}

// random returns a division of pods and namespaces by some of the keys.
func random(t *testing.T, r *rand.Rand, keys []string) *Division {
	var owned []string
	for _, k := range keys {
		if r.IntN(2) == 0 {
			owned = append(owned, k)
		}
	}
	s := &meshv1.Sharding{
		Shard: "s", ReadAll: r.IntN(2) == 0, Standby: r.IntN(5) == 0,
		Key: meshv1.Key(r.IntN(2)), Method: []meshv1.Method{meshv1.Method_METHOD_AUTO, meshv1.Method_METHOD_SERVER_SIDE, meshv1.Method_METHOD_FILTER}[r.IntN(3)],
		Limits: []*meshv1.Limit{{Scope: sharding.Keys(owned...).Proto(), Resources: []*meshv1.ResourceGroup{{ApiGroups: []string{""}, Resources: []string{"pods", "namespaces"}}}}},
	}
	if r.IntN(3) == 0 {
		s.Shared = []*meshv1.SharedObjects{{Resources: s.Limits[0].Resources, Namespaces: []string{keys[r.IntN(len(keys))]}}}
	}
	d, err := Compile(s, "ns")
	require.NoError(t, err)
	return d
}

// selected reports whether selectors select an object, which has no labels.
func selected(t *testing.T, d *Difference, k filter.Key) bool {
	selector, shards := d.Selectors()
	if selector != nil {
		return false // of these divisions, it is Nothing
	}
	if shards == "" {
		return true
	}
	key := k.Namespace
	if strings.Contains(shards, "metadata.uid") {
		key = k.UID
	}
	hash := sharding.Hash(key)
	for term := range strings.SplitSeq(shards, " || ") {
		var field, first, end string
		_, err := fmt.Sscanf(strings.NewReplacer("shardRange(", "", ",", "", "'", "", ")", "").Replace(term), "%s %s %s", &field, &first, &end)
		require.NoError(t, err, term)
		if fmt.Sprintf("0x%016x", hash) >= first && (len(end) > len(first) || fmt.Sprintf("0x%016x", hash) < end) {
			return true
		}
	}
	return false
}

// The selectors of a difference select every object that one division shows and the other
// does not, and Judge says which.
func TestDifferenceSelectsWhatDivisionsDifferIn(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	keys := []string{"a", "b", "c", "d", "e"}
	narrowed, moved := 0, 0
	for range 5000 {
		before, after := random(t, r, keys), random(t, r, keys)
		kind := watchedPods
		if r.IntN(3) == 0 {
			kind.Resource = "namespaces"
		}
		namespace := ""
		if r.IntN(3) == 0 && kind.Resource == "pods" {
			namespace = keys[r.IntN(len(keys))]
		}
		d, ok := after.Difference([]*Division{before}, kind, namespace, "")
		if !ok {
			continue
		}
		for _, key := range keys {
			k := filter.Key{Namespace: []byte(key), Name: []byte("x"), UID: []byte(keys[r.IntN(len(keys))])}
			if kind.Resource == "namespaces" {
				k = filter.Key{Name: []byte(key), UID: k.UID}
			}
			if namespace != "" && namespace != key {
				continue
			}
			was, is := before.shown(kind, namespace, "").shows(k), after.shown(kind, namespace, "").shows(k)
			gained, lost := d.Compare(k)
			require.Equal(t, is && !was, gained)
			require.Equal(t, was && !is, lost)
			isSelected := selected(t, d, k)
			require.True(t, isSelected || was == is, "%v: %v to %v: %s", d, before.message, after.message, key)
			if was == is && !isSelected {
				narrowed++
			} else if was != is {
				moved++
			}
		}
	}
	require.Greater(t, narrowed, 1000)
	require.Greater(t, moved, 1000)
}

func TestDifferenceByLabelsIsUnknown(t *testing.T) {
	of := func(selector string, standby bool) *Division {
		d, err := Compile(&meshv1.Sharding{Standby: standby, Limits: []*meshv1.Limit{{Selector: selector}}}, "ns")
		require.NoError(t, err)
		return d
	}
	_, ok := of("a=1", false).Difference([]*Division{of("a=2", false)}, watchedPods, "", "")
	require.False(t, ok)
	d, ok := of("a=1", false).Difference([]*Division{of("a=2", true)}, watchedPods, "", "")
	require.True(t, ok)
	selector, _ := d.Selectors()
	require.Equal(t, "a=1", selector.String())
	gained, lost := d.Compare(filter.Key{Name: []byte("x")})
	require.True(t, gained && !lost)
}
