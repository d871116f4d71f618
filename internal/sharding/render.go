package sharding

import (
	"fmt"
	"math/bits"
	"slices"
	"strconv"
	"strings"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

// MaxShardRanges is the maximum number of ranges in the result of ShardSelector. Each costs the
// apiserver a comparison for every object.
const MaxShardRanges = 64

// ShardSelector returns the scope as Kubernetes' shardSelector on a field, in the form in which
// shardInfo returns it. It is not ok if that is impossible: the scope owns nothing, distinguishes
// buckets, or has more than MaxShardRanges.
func (s Scope) ShardSelector(field string) (selector string, ok bool) {
	if len(s.parts) != 1 || s.parts[0].buckets != allBuckets || len(s.parts[0].ranges) > MaxShardRanges {
		return "", false
	}
	terms := make([]string, len(s.parts[0].ranges))
	for i, r := range s.parts[0].ranges {
		end := "0x10000000000000000"
		if r.Last != Whole.Last {
			end = fmt.Sprintf("0x%016x", r.Last+1)
		}
		terms[i] = fmt.Sprintf("shardRange(%s, '0x%016x', '%s')", field, r.First, end)
	}
	return strings.Join(terms, " || "), true
}

// OnlyBuckets returns the buckets of a scope that consists of whole buckets.
func (s Scope) OnlyBuckets() (buckets []int, ok bool) {
	if len(s.parts) != 1 || !slices.Equal(s.parts[0].ranges, []Range{Whole}) {
		return nil, false
	}
	for m := s.parts[0].buckets; m != 0; m &= m - 1 {
		buckets = append(buckets, bits.TrailingZeros32(m))
	}
	return buckets, true
}

// Strings returns the readable form of the scope, one text for each set of buckets: the buckets,
// if they are not all, and ranges of the key space in hexadecimal:
// "0000000000000000-7fffffffffffffff", "buckets 1,5: 0000000000000000-ffffffffffffffff".
func (s Scope) Strings() []string {
	out := make([]string, 0, len(s.parts))
	for _, p := range s.parts {
		ranges := make([]string, len(p.ranges))
		for i, r := range p.ranges {
			ranges[i] = fmt.Sprintf("%016x-%016x", r.First, r.Last)
		}
		text := strings.Join(ranges, ",")
		if p.buckets != allBuckets {
			text = prefix + strings.Join(numbers(p.buckets), ",") + ": " + text
		}
		out = append(out, text)
	}
	return out
}

const prefix = "buckets "

// numbers returns the numbers of a set of buckets, in order.
func numbers(set uint32) (list []string) {
	for ; set != 0; set &= set - 1 {
		list = append(list, strconv.Itoa(bits.TrailingZeros32(set)))
	}
	return list
}

// String returns Strings on one line.
func (s Scope) String() string { return strings.Join(s.Strings(), "; ") }

// Parse parses the result of Strings.
func Parse(parts []string) (Scope, error) {
	out := &meshv1.Scope{}
	for _, text := range parts {
		buckets := uint32(allBuckets)
		ranges := text
		if rest, ok := strings.CutPrefix(text, prefix); ok {
			var list string
			if list, ranges, ok = strings.Cut(rest, ": "); !ok {
				return Scope{}, fmt.Errorf("scope %q: no ranges", text)
			}
			buckets = 0
			for b := range strings.SplitSeq(list, ",") {
				n, err := strconv.ParseUint(b, 10, 8)
				if err != nil || n >= Buckets {
					return Scope{}, fmt.Errorf("scope %q: %q is no bucket", text, b)
				}
				buckets |= 1 << n
			}
		}
		part := &meshv1.ScopePart{Buckets: buckets}
		for r := range strings.SplitSeq(ranges, ",") {
			first, last, ok := strings.Cut(r, "-")
			lo, err1 := strconv.ParseUint(first, 16, 64)
			hi, err2 := strconv.ParseUint(last, 16, 64)
			if !ok || err1 != nil || err2 != nil || lo > hi {
				return Scope{}, fmt.Errorf("scope %q: %q is no range", text, r)
			}
			part.Ranges = append(part.Ranges, &meshv1.KeyRange{First: lo, Last: hi})
		}
		out.Parts = append(out.Parts, part)
	}
	return FromProto(out)
}

// Proto returns the wire form. The empty scope has no parts.
func (s Scope) Proto() *meshv1.Scope {
	out := &meshv1.Scope{}
	for _, p := range s.parts {
		w := &meshv1.ScopePart{Buckets: p.buckets}
		for _, r := range p.ranges {
			w.Ranges = append(w.Ranges, &meshv1.KeyRange{First: r.First, Last: r.Last})
		}
		out.Parts = append(out.Parts, w)
	}
	return out
}

// FromProto converts the wire form, which need not be canonical. A nil message owns nothing.
func FromProto(m *meshv1.Scope) (Scope, error) {
	var sets [Buckets][]Range
	for i, p := range m.GetParts() {
		if p.GetBuckets() == 0 || len(p.GetRanges()) == 0 {
			return Scope{}, fmt.Errorf("part %d of a scope has no buckets or no ranges", i)
		}
		ranges := make([]Range, 0, len(p.GetRanges()))
		for _, r := range p.GetRanges() {
			if r.GetFirst() > r.GetLast() {
				return Scope{}, fmt.Errorf("part %d of a scope has a range that ends before it begins", i)
			}
			ranges = append(ranges, Range{r.GetFirst(), r.GetLast()})
		}
		for b := p.GetBuckets(); b != 0; b &= b - 1 {
			n := bits.TrailingZeros32(b)
			sets[n] = normal(slices.Concat(sets[n], ranges))
		}
	}
	return canonical(sets), nil
}

// LabelSelector returns the scope as a selector on the mesh's labels, for the existing
// namespaces. It is empty for everything. It is canonical.
func (s Scope) LabelSelector(namespaces []string) string {
	if s.Everything() {
		return ""
	}
	if _, ok := s.OnlyBuckets(); ok {
		return in(v1alpha1.ShardingHashLabel, numbers(s.parts[0].buckets))
	}
	owned := slices.DeleteFunc(slices.Clone(namespaces), func(n string) bool { return !s.Owns(n) })
	if len(owned) == 0 {
		return v1alpha1.NamespaceLabel + ",!" + v1alpha1.NamespaceLabel
	}
	return in(v1alpha1.NamespaceLabel, owned)
}

// in returns a requirement in the form of labels.Selector.
func in(key string, values []string) string {
	slices.Sort(values)
	return key + " in (" + strings.Join(slices.Compact(values), ",") + ")"
}
