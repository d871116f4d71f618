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
	// may is set if the configuration may have the lock now.
	may bool
	// holds is set if the mesh holds the lock for it, had if it had the lock, alone or with others.
	holds, had bool
}

// precedes orders contenders: those whose pods may act are first.
func precedes(a, b contender) int {
	rank := func(c contender) int {
		switch {
		case c.holds:
			return 0
		case c.had:
			return 1
		case c.may:
			return 2
		}
		return 3
	}
	return cmp.Or(cmp.Compare(rank(a), rank(b)), strings.Compare(a.config.String(), b.config.String()))
}

// Overlap returns an object that two configurations would both own; empty if there is none. It is not
// ok if they were not compared yet.
type Overlap = func(a, b types.NamespacedName) (object string, ok bool)

// contest returns which configurations may share a lock, the first of them first, and why others may
// not have it. Without the mesh, one pod leads by the lock. With it, one pod leads for each
// configuration, so that two of them must not own one object. acting are configurations that had the
// lock and do not demand it any more, while their pods may act by it: nobody else gets it meanwhile.
func contest(contenders []contender, acting []types.NamespacedName, overlap Overlap) (winners []types.NamespacedName, losers map[types.NamespacedName]string) {
	losers = map[types.NamespacedName]string{}
	for _, c := range slices.SortedFunc(slices.Values(contenders), precedes) {
		if why := c.loses(winners, overlap); why != "" {
			losers[c.config] = why
			continue
		}
		switch {
		case c.holds || c.had:
			winners = append(winners, c.config)
		case len(acting) > 0:
			losers[c.config] = fmt.Sprintf("pods of ShardingConfig %s may still act by it", acting[0])
		case c.may:
			winners = append(winners, c.config)
		}
	}
	return winners, losers
}

// loses returns why a contender may not have a lock beside others; empty if it may.
func (c contender) loses(winners []types.NamespacedName, overlap Overlap) string {
	for _, w := range winners {
		switch object, ok := overlap(w, c.config); {
		case object != "":
			return fmt.Sprintf("ShardingConfig %s has it, and both would own %s: divide other objects, or delete one of them", w, object)
		case !ok && !c.holds && !c.had:
			return fmt.Sprintf("ShardingConfig %s has it, and their selectors are long: whether both would own an object is not known yet", w)
		}
	}
	return ""
}

// hold decides which of the configurations that demand the lock have it. feasible reports whether a demand
// could be met now, nobodyActs whether no pod acts for a configuration.
func (l *lock) hold(demands []Demand, feasible func(Demand) bool, nobodyActs func(types.NamespacedName) bool, overlap Overlap) {
	holder, held := l.heldFor()
	former := l.winners
	if held {
		former = append(slices.Clone(former), holder)
	}
	var contenders []contender
	for _, d := range demands {
		former = slices.DeleteFunc(slices.Clone(former), func(f types.NamespacedName) bool { return f == d.Config })
		if _, denied := l.denied(d.Config); denied || d.Mode == Release {
			continue
		}
		had := slices.Contains(l.winners, d.Config) || slices.ContainsFunc(d.Locks, func(k Lock) bool { return k.NamespacedName == l.NamespacedName && k.Held })
		c := contender{d.Config, d.Mode >= Acquire && feasible(d), held && holder == d.Config, had}
		if i := slices.IndexFunc(contenders, func(other contender) bool { return other.config == c.config }); i >= 0 {
			contenders[i].may = contenders[i].may || c.may
			continue
		}
		contenders = append(contenders, c)
	}
	var acting []types.NamespacedName
	for _, f := range former {
		if !nobodyActs(f) {
			acting = append(acting, f)
		}
	}
	l.winners, l.losers = contest(contenders, acting, overlap)
}
