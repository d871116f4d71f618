package locks

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"
)

// contender is a configuration that demands a lock.
type contender struct {
	config types.NamespacedName
	mode   Mode
	// holds is set if the mesh holds the lock for it, shared if the last contest let it have the lock.
	holds, shared bool
}

// precedes orders contenders: whose pods may act are first.
func precedes(a, b contender) int {
	first := func(a, b bool) int {
		switch {
		case a == b:
			return 0
		case a:
			return -1
		}
		return 1
	}
	return cmp.Or(first(a.holds, b.holds), first(a.shared, b.shared), cmp.Compare(b.mode, a.mode), strings.Compare(a.config.String(), b.config.String()))
}

// contest returns which configurations may share a lock, the first of them first, and why others may
// not have it. Without the mesh, one pod leads by the lock. With it, one pod leads for each
// configuration, so that two of them must not own one object. A configuration that may not act now
// keeps the lock from others only if it had it.
func contest(contenders []contender, overlap Overlap) (winners []types.NamespacedName, losers map[types.NamespacedName]string) {
	losers = map[types.NamespacedName]string{}
	for _, c := range slices.SortedFunc(slices.Values(contenders), precedes) {
		if c.mode < Acquire && !c.holds && !c.shared {
			continue
		}
		if winner, object := first(winners, c.config, overlap); object != "" {
			losers[c.config] = fmt.Sprintf("ShardingConfig %s has it, and both would own %s: divide other objects, or delete one of them", winner, object)
			continue
		}
		winners = append(winners, c.config)
	}
	return winners, losers
}

// Overlap returns an object that two configurations would both own; empty if there is none.
type Overlap = func(a, b types.NamespacedName) (object string)

func first(winners []types.NamespacedName, config types.NamespacedName, overlap Overlap) (winner types.NamespacedName, object string) {
	for _, w := range winners {
		if object := overlap(w, config); object != "" {
			return w, object
		}
	}
	return types.NamespacedName{}, ""
}

// contenders returns the configurations that demand a lock, except those without permission.
func (l *lock) contenders(demands []Demand) (out []contender) {
	holder, held := l.heldFor()
	for _, d := range demands {
		if _, denied := l.denied(d.Config); denied || d.Mode == Release {
			continue
		}
		if i := slices.IndexFunc(out, func(c contender) bool { return c.config == d.Config }); i >= 0 {
			out[i].mode = max(out[i].mode, d.Mode)
			continue
		}
		out = append(out, contender{d.Config, d.Mode, held && holder == d.Config, slices.Contains(l.winners, d.Config)})
	}
	return out
}
