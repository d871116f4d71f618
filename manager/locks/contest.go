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
	// releases is set if no pod acts for it, and it gives the lock up.
	releases bool
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
		case c.releases:
		case c.holds || c.had:
			winners = append(winners, c.config)
		case len(acting) > 0:
			losers[c.config] = fmt.Sprintf("pods may still act by it for ShardingConfig %s, until agents have confirmed the policies of its namespace", acting[0])
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

// hold decides which of the configurations that demand the lock have it. feasible reports whether a
// demand could be met now, nobodyActs whether no pod acts for a configuration.
func (l *lock) hold(demands []Demand, feasible func(Demand) bool, nobodyActs func(types.NamespacedName) bool, overlap Overlap) {
	holder, held := l.heldFor()
	l.leave(demands, nobodyActs)
	var contenders []contender
	for _, d := range demands {
		if _, denied := l.denied(d.Config); denied {
			continue
		}
		c := contender{config: d.Config, releases: d.Mode == Release}
		if !c.releases {
			c.may, c.holds = d.Mode >= Acquire && feasible(d), held && holder == d.Config
			c.had = held && slices.Contains(l.winners, d.Config) || slices.ContainsFunc(d.Locks, func(k Lock) bool { return k.NamespacedName == l.NamespacedName && k.Held })
		}
		if i := slices.IndexFunc(contenders, func(other contender) bool { return other.config == c.config }); i >= 0 {
			contenders[i].may = contenders[i].may || c.may
			continue
		}
		contenders = append(contenders, c)
	}
	l.winners, l.losers = contest(contenders, l.former, overlap)
}

// leave notes which configurations had the lock and do not demand it any more, while pods may act for
// them.
func (l *lock) leave(demands []Demand, nobodyActs func(types.NamespacedName) bool) {
	had := slices.Concat(l.former, l.winners)
	if holder, held := l.heldFor(); held {
		had = append(had, holder)
	}
	l.former = nil
	for _, config := range had {
		demanded := slices.ContainsFunc(demands, func(d Demand) bool { return d.Config == config })
		if !demanded && !slices.Contains(l.former, config) && !nobodyActs(config) {
			l.former = append(l.former, config)
		}
	}
}
