package quota

import (
	"cmp"
	"slices"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

// maxRecord bounds the size of a record in a status, in bytes, because the apiserver bounds
// the size of objects.
const maxRecord = 512 << 10

// shares are bounds on the shares in force, by rule and pod. Rules may share one inner map.
type shares map[string]map[string]Share

// sharesOf parses a record.
func sharesOf(record []v1alpha1.RuleShares) shares {
	out := shares{}
	for _, r := range record {
		pods := make(map[string]Share, len(r.Pods))
		for pod, text := range r.Pods {
			if s := ParseShare(text); !s.None() {
				pods[pod] = s
			}
		}
		for _, rule := range r.Rules {
			out[rule] = pods
		}
	}
	return out
}

// podBound is the bound on a pod's share.
type podBound struct {
	pod string
	may Share
}

// write returns the record of the bounds of all members. Rules with equal bounds share one
// entry. ok is false if the record would exceed maxRecord.
func (br *breaker) write() (out []v1alpha1.RuleShares, ok bool) {
	byRule := map[string][]*group{}
	var rules []string
	for at, g := range br.groups {
		if byRule[at[0]] == nil {
			rules = append(rules, at[0])
		}
		byRule[at[0]] = append(byRule[at[0]], g)
	}
	slices.Sort(rules)
	var written [][]podBound // the content of out, by index
	size := 0
	for _, rule := range rules {
		now := boundsOf(byRule[rule])
		if len(now) == 0 {
			continue
		}
		size += len(rule) + len(`"",`)
		i := slices.IndexFunc(written, func(w []podBound) bool { return slices.Equal(w, now) })
		if i < 0 {
			i = len(out)
			pods := make(map[string]string, len(now))
			for _, h := range now {
				text := h.may.String()
				size += len(h.pod) + len(text) + len(`"":"",`)
				pods[h.pod] = text
			}
			out, written = append(out, v1alpha1.RuleShares{Pods: pods}), append(written, now)
		}
		if size > maxRecord {
			return nil, false
		}
		out[i].Rules = append(out[i].Rules, rule)
	}
	return out, true
}

// boundsOf returns the bounds of a rule, sorted by the names of the pods. Pods with the same
// name share one bound, which covers all of them.
func boundsOf(groups []*group) []podBound {
	var all []podBound
	for _, g := range groups {
		all = slices.Grow(all, len(g.members))
		for _, m := range g.members {
			if !m.May.None() {
				all = append(all, podBound{m.name, m.May})
			}
		}
	}
	slices.SortFunc(all, func(a, b podBound) int { return cmp.Compare(a.pod, b.pod) })
	out := all[:0]
	for _, h := range all {
		if last := len(out) - 1; last >= 0 && out[last].pod == h.pod {
			out[last].may = bound(out[last].may, h.may)
		} else {
			out = append(out, h)
		}
	}
	return out
}
