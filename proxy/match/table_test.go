package match

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/header"
)

// What a table finds is what asking each match finds, in the same order.
func TestTableFindsAllMatches(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	some := func(of string, most int) (out []string) {
		for range random.IntN(most + 1) {
			out = append(out, fmt.Sprint(of, random.IntN(12)))
		}
		if random.IntN(8) == 0 {
			out = append(out, "*")
		}
		return out
	}
	for range 200 {
		var matches []*Resource
		for range random.IntN(30) {
			m := &meshv1.ResourceMatch{
				Verbs: some("verb", 1), Resources: some("kind", 2),
				Namespaces: some("ns", 2*few), Names: some("name", 2),
			}
			if random.IntN(4) == 0 {
				m.Headers = []*meshv1.HeaderMatch{{Name: "X-A", Value: "1"}, {Name: "X-B", Value: fmt.Sprint(random.IntN(2))}}
			}
			compiled, err := NewResource(m)
			require.NoError(t, err)
			matches = append(matches, compiled)
		}
		table := NewTable(matches)
		for range 30 {
			k := Kind{Verb: fmt.Sprint("verb", random.IntN(12)), Resource: fmt.Sprint("kind", random.IntN(12))}
			o := Object{
				Namespace: fmt.Sprint("ns", random.IntN(12)), Name: fmt.Sprint("name", random.IntN(12)), Lock: random.IntN(4) == 0,
				Header: header.Fields{{Name: "X-A", Value: "1"}, {Name: "X-B", Value: fmt.Sprint(random.IntN(2))}},
			}
			var want, kind, got []int32
			for i, m := range matches {
				if fresh := o; m.Of(k) {
					kind = append(kind, int32(i))
					if m.Match(&fresh) {
						want = append(want, int32(i))
					}
				}
			}
			x := table.OfKind(k)
			if kind == nil {
				require.Nil(t, x)
				continue
			}
			require.Equal(t, kind, x.All())
			require.Same(t, x, table.OfKind(k))
			of := x.Of(&o)
			for numbers := of.Next(); numbers != nil; numbers = of.Next() {
				for _, n := range numbers {
					if matches[n].Match(&o) {
						got = append(got, n)
					}
				}
			}
			require.Equal(t, want, got)
		}
	}
}

// A request looks at no rule that names another namespace or name.
func TestTableOmitsOtherObjects(t *testing.T) {
	var matches []*Resource
	for i := range 10 {
		for _, m := range []*meshv1.ResourceMatch{{Namespaces: []string{fmt.Sprint("ns", i)}}, {Names: []string{fmt.Sprint("name", i)}}, {}} {
			compiled, err := NewResource(m)
			require.NoError(t, err)
			matches = append(matches, compiled)
		}
	}
	looked := func(o Object) (n int) {
		of := NewTable(matches).OfKind(Kind{Verb: "get"}).Of(&o)
		for numbers := of.Next(); numbers != nil; numbers = of.Next() {
			n += len(numbers)
		}
		return n
	}
	require.Equal(t, 12, looked(Object{Namespace: "ns1", Name: "name2"}))
	require.Equal(t, 10, looked(Object{Namespace: "other"}))
	require.Equal(t, 1, looked(Object{Namespace: "ns1", Name: "name2", Lock: true}))
}

// Paths can name any kind; what is remembered of them depends on the rules alone.
func TestTableSharesEqualIndexes(t *testing.T) {
	any, err := NewResource(&meshv1.ResourceMatch{})
	require.NoError(t, err)
	pods, err := NewResource(&meshv1.ResourceMatch{Resources: []string{"pods"}})
	require.NoError(t, err)
	table := NewTable([]*Resource{any, pods})
	for i := range 1000 {
		table.OfKind(Kind{Verb: "get", Resource: fmt.Sprint("kind", i)})
	}
	table.OfKind(Kind{Verb: "get", Resource: "pods"})
	require.Len(t, table.known, 2)
}

func TestHosts(t *testing.T) {
	var urls []*URL
	add := func(host *meshv1.TextMatch) {
		u, err := NewURL(&meshv1.HttpMatch{Host: host})
		require.NoError(t, err)
		urls = append(urls, u)
	}
	add(nil)
	add(&meshv1.TextMatch{Kind: &meshv1.TextMatch_Exact{Exact: "a.example.com"}})
	add(&meshv1.TextMatch{Kind: &meshv1.TextMatch_Suffix{Suffix: ".example.com"}})
	add(&meshv1.TextMatch{Kind: &meshv1.TextMatch_Regexp{Regexp: `b\..*`}})
	h := NewHosts(urls)
	found := func(host string) []int32 {
		of, sure := h.Of(host)
		require.Equal(t, host != "", sure)
		return of
	}
	for range 2 {
		require.Equal(t, []int32{0, 1, 2}, found("a.example.com"))
		require.Equal(t, []int32{0, 2, 3}, found("b.example.com"))
		require.Equal(t, []int32{0}, found("other"))
		require.Equal(t, []int32{0, 1, 2, 3}, found(""), "any may be about what is not seen")
	}
	require.Len(t, *h.known.Load(), 3)
	require.Zero(t, testing.AllocsPerRun(100, func() { h.Of("b.example.com") }))
	for i := range 10 * maxHosts {
		require.Equal(t, []int32{0, 2}, found(fmt.Sprint(i, ".example.com")))
		require.LessOrEqual(t, len(*h.known.Load()), maxHosts)
	}
	for len(urls) < maxFound/4 { // with more found for each
		urls = append(urls, urls[0])
	}
	h = NewHosts(urls)
	for i := range maxHosts {
		h.Of(fmt.Sprint(i))
		require.LessOrEqual(t, len(*h.known.Load()), 6)
	}
}
