package sharding

import (
	"fmt"
	"math"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	apisharding "k8s.io/apimachinery/pkg/sharding"
	"k8s.io/apiserver/pkg/sharding"
	"pgregory.net/rapid"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

var (
	genKey = rapid.OneOf(rapid.StringMatching(`[a-c]`), rapid.StringMatching(`tenant-[0-9]{1,2}`), rapid.String())

	// genHash favours where ranges could go wrong: at the ends, and near keys.
	genHash = rapid.OneOf(
		rapid.Uint64(),
		rapid.SampledFrom([]uint64{0, 1, math.MaxUint64 - 1, math.MaxUint64, 1 << 63}),
		rapid.Map(genKey, Hash),
		rapid.Map(genKey, func(k string) uint64 { return Hash(k) + 1 }),
		rapid.Map(genKey, func(k string) uint64 { return Hash(k) - 1 }),
	)
	genRanges = rapid.Custom(func(t *rapid.T) Scope {
		var ranges []Range
		for range rapid.IntRange(0, 4).Draw(t, "ranges") {
			ranges = append(ranges, Range{genHash.Draw(t, "first"), genHash.Draw(t, "last")})
		}
		return Of(ranges...)
	})
	genBuckets = rapid.Map(rapid.SliceOfN(rapid.IntRange(-1, 32), 0, 40), func(b []int) Scope { return InBuckets(b...) })
	genKeys    = rapid.Map(rapid.SliceOfN(genKey, 0, 5), func(k []string) Scope { return Keys(k...) })
	genSimple  = rapid.OneOf(genRanges, genBuckets, genKeys, rapid.Just(All()), rapid.Just(Scope{}))
	genScope   = rapid.Custom(func(t *rapid.T) Scope {
		s := genSimple.Draw(t, "scope")
		for range rapid.IntRange(0, 3).Draw(t, "operations") {
			other := genSimple.Draw(t, "other")
			switch rapid.IntRange(0, 2).Draw(t, "operation") {
			case 0:
				s = Union(s, other)
			case 1:
				s = s.Intersect(other)
			default:
				s = s.Minus(other)
			}
		}
		return s
	})
)

func TestOwnsFollowsTheAlgebra(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a, b := genScope.Draw(t, "a"), genScope.Draw(t, "b")
		for range 20 {
			h := genHash.Draw(t, "hash")
			require.Equal(t, a.OwnsHash(h) || b.OwnsHash(h), Union(a, b).OwnsHash(h))
			require.Equal(t, a.OwnsHash(h) && b.OwnsHash(h), a.Intersect(b).OwnsHash(h))
			require.Equal(t, a.OwnsHash(h) && !b.OwnsHash(h), a.Minus(b).OwnsHash(h))
		}
		key := genKey.Draw(t, "key")
		require.True(t, Union(a, Keys(key)).Owns(key))
		require.False(t, a.Minus(Keys(key)).Owns(key))
		require.True(t, InBuckets(Bucket(key)).Owns(key))
		require.False(t, All().Minus(InBuckets(Bucket(key))).Owns(key))
		if hull, ok := a.Hull(); ok {
			require.True(t, a.Minus(Of(hull)).Empty())
			require.True(t, a.Overlaps(Of(Range{hull.First, hull.First})) && a.Overlaps(Of(Range{hull.Last, hull.Last})))
		} else {
			require.True(t, a.Empty())
		}
	})
}

// Equal sets are of one form, whatever they were made of.
func TestTheFormIsCanonical(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a, b, c := genScope.Draw(t, "a"), genScope.Draw(t, "b"), genScope.Draw(t, "c")
		for law, pair := range map[string][2]Scope{
			"commutative union":        {Union(a, b), Union(b, a)},
			"commutative intersection": {a.Intersect(b), b.Intersect(a)},
			"associative union":        {Union(a, Union(b, c)), Union(Union(a, b), c)},
			"associative intersection": {a.Intersect(b.Intersect(c)), a.Intersect(b).Intersect(c)},
			"distributive":             {a.Intersect(Union(b, c)), Union(a.Intersect(b), a.Intersect(c))},
			"De Morgan":                {All().Minus(Union(a, b)), All().Minus(a).Intersect(All().Minus(b))},
			"twice the complement":     {All().Minus(All().Minus(a)), a},
			"difference":               {a.Minus(b), a.Intersect(All().Minus(b))},
			"parts":                    {Union(a.Minus(b), a.Intersect(b)), a},
			"idempotent":               {Union(a, a), a},
			"neutral":                  {Union(a, Scope{}).Intersect(All()), a},
			"nothing is left":          {a.Minus(a), Scope{}},
		} {
			require.True(t, pair[0].Equal(pair[1]), law)
			require.Equal(t, pair[0].String(), pair[1].String(), law)
			require.True(t, proto.Equal(pair[0].Proto(), pair[1].Proto()), law)
		}
		require.Equal(t, a.Equal(b), a.Minus(b).Empty() && b.Minus(a).Empty())
		require.Equal(t, a.Overlaps(b), !a.Intersect(b).Empty())
		require.Equal(t, a.Everything(), All().Minus(a).Empty())
	})
}

func TestRoundTrips(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a := genScope.Draw(t, "a")
		parsed, err := Parse(a.Strings())
		require.NoError(t, err)
		require.True(t, a.Equal(parsed))
		wire, err := proto.Marshal(a.Proto())
		require.NoError(t, err)
		var m meshv1.Scope
		require.NoError(t, proto.Unmarshal(wire, &m))
		read, err := FromProto(&m)
		require.NoError(t, err)
		require.True(t, a.Equal(read))
	})
}

func TestParseRefuses(t *testing.T) {
	for _, text := range []string{"", "0", "1-0", "x-1", "buckets 1", "buckets 32: 0-1", "buckets : 0-1", "buckets -1: 0-1", "0-10000000000000000", "0-1,"} {
		_, err := Parse([]string{text})
		require.ErrorContains(t, err, fmt.Sprintf("%q", text))
	}
}

// All methods agree on every object.
func TestMethodsAgree(t *testing.T) {
	rendered := 0
	rapid.Check(t, func(t *rapid.T) {
		s := genScope.Draw(t, "scope")
		namespaces := rapid.SliceOfN(rapid.StringMatching(`[a-c]|tenant-[0-9]{1,2}`), 1, 20).Draw(t, "namespaces")

		var server apisharding.Selector
		if text, ok := s.ShardSelector("object.metadata.namespace"); ok {
			var err error
			server, err = sharding.Parse(text)
			require.NoError(t, err)
			require.Equal(t, text, server.String(), "spelled as it is echoed")
			rendered++
		}
		text := s.LabelSelector(namespaces)
		byLabels, err := labels.Parse(text)
		require.NoError(t, err)
		require.Equal(t, text, byLabels.String())
		require.Equal(t, s.Everything(), text == "")

		for _, namespace := range namespaces {
			object := &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Labels: map[string]string{
				v1alpha1.NamespaceLabel: namespace, v1alpha1.ShardingHashLabel: BucketLabel(namespace),
			}}}
			require.Equal(t, s.Owns(namespace), byLabels.Matches(labels.Set(object.Labels)), "%s by labels %s", namespace, text)
			if server != nil {
				matches, err := server.Matches(object)
				require.NoError(t, err)
				require.Equal(t, s.Owns(namespace), matches, "%s by the server", namespace)
			}
		}
		if uids, ok := s.ShardSelector("object.metadata.uid"); ok {
			server, err := sharding.Parse(uids)
			require.NoError(t, err)
			object := &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{UID: "8a3b6c1e-0000-4000-8000-000000000001"}}
			matches, err := server.Matches(object)
			require.NoError(t, err)
			require.Equal(t, s.Owns(string(object.UID)), matches)
		}
	})
	require.Positive(t, rendered)
}

func TestWhatAShardSelectorCannotSay(t *testing.T) {
	var many []Range
	for i := range uint64(MaxShardRanges + 1) {
		many = append(many, Range{i * 10, i * 10})
	}
	for _, s := range []Scope{{}, InBuckets(3), Union(Keys("a"), InBuckets(3)), Of(many...)} {
		_, ok := s.ShardSelector("object.metadata.namespace")
		require.False(t, ok, "%s", s)
	}
	_, ok := Of(many[1:]...).ShardSelector("object.metadata.namespace")
	require.True(t, ok)
	text, _ := All().ShardSelector("object.metadata.uid")
	require.Equal(t, "shardRange(object.metadata.uid, '0x0000000000000000', '0x10000000000000000')", text)
}

func TestLabelSelector(t *testing.T) {
	require.Equal(t, "ctrlmesh.kusionstack.io/sharding-hash in (10,2)", InBuckets(2, 10).LabelSelector(nil))
	require.Equal(t, "ctrlmesh.kusionstack.io/namespace in (a,b)", Keys("a", "b", "c").LabelSelector([]string{"b", "x", "a", "b"}))
	require.Equal(t, "ctrlmesh.kusionstack.io/namespace,!ctrlmesh.kusionstack.io/namespace", Keys("a").LabelSelector([]string{"x"}))
	require.Empty(t, All().LabelSelector([]string{"a"}))
}

func FuzzFromProto(f *testing.F) {
	for _, s := range []Scope{{}, All(), InBuckets(1, 7), Union(Keys("a"), InBuckets(3)), Of(Range{5, 9})} {
		wire, err := proto.Marshal(s.Proto())
		require.NoError(f, err)
		f.Add(wire)
	}
	f.Fuzz(func(t *testing.T, wire []byte) {
		var m meshv1.Scope
		if proto.Unmarshal(wire, &m) != nil {
			return
		}
		s, err := FromProto(&m)
		if err != nil {
			return
		}
		again, err := FromProto(s.Proto())
		require.NoError(t, err)
		require.True(t, s.Equal(again))
	})
}

func FuzzParse(f *testing.F) {
	for _, s := range []Scope{All(), InBuckets(1, 7), Union(Keys("a"), InBuckets(3))} {
		for _, text := range s.Strings() {
			f.Add(text)
		}
	}
	f.Fuzz(func(t *testing.T, text string) {
		s, err := Parse([]string{text})
		if err != nil {
			return
		}
		again, err := Parse(s.Strings())
		require.NoError(t, err)
		require.True(t, s.Equal(again))
	})
}

func BenchmarkOwns(b *testing.B) {
	taken := Union(InBuckets(3), Keys("a", "b", "c"))
	for name, s := range map[string]Scope{
		"range":            Of(Range{1 << 61, 1 << 62}),
		"rest of a canary": Of(Range{1 << 61, math.MaxUint64}).Minus(taken),
		"canary":           taken,
	} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				s.Owns("tenant-0042")
			}
		})
	}
}
