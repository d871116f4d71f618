package lock

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/controllers"
	"github.com/ctrlmesh/ctrlmesh/manager/label"
	"github.com/ctrlmesh/ctrlmesh/manager/validate"
)

// compareWithin bounds the comparisons of a round: selectors may be long, and renewals must not wait.
const compareWithin = time.Second

// overlaps remembers which configurations would both own an object. The zero value is ready to use.
type overlaps struct {
	known map[pair]string
	// limits are those by which pods of configurations may act: the current ones, and those before until
	// no pod acts by them.
	limits map[types.NamespacedName][]limits
}

// pair is the limits of two configurations that were compared.
type pair struct{ a, b [sha256.Size]byte }

// limits are those of a configuration at a time.
type limits struct {
	of   *v1alpha1.ShardingConfig
	hash [sha256.Size]byte
}

func limitsOf(c *v1alpha1.ShardingConfig) limits {
	text, _ := json.Marshal(label.Limits(c)) // it cannot fail
	return limits{c, sha256.Sum256(text)}
}

// round is the comparisons of one round. What the last round did not need is forgotten.
type round struct {
	ctx        context.Context //nolint:containedctx // of the round
	byName     map[types.NamespacedName]*v1alpha1.ShardingConfig
	nobodyActs func(types.NamespacedName) bool
	end        time.Time // of comparisons; zero before the first
	last, next *overlaps
}

func (o *overlaps) round(ctx context.Context, l *controllers.Listed, nobodyActs func(types.NamespacedName) bool) *round {
	last := *o
	*o = overlaps{known: map[pair]string{}, limits: map[types.NamespacedName][]limits{}}
	r := &round{ctx: ctx, byName: map[types.NamespacedName]*v1alpha1.ShardingConfig{}, nobodyActs: nobodyActs, last: &last, next: o}
	for _, c := range l.Configs {
		r.byName[client.ObjectKeyFromObject(c)] = c
	}
	return r
}

// overlap implements [locks.Overlap].
func (r *round) overlap(a, b types.NamespacedName) (object string, ok bool) {
	for _, one := range r.limits(a) {
		for _, other := range r.limits(b) {
			if object, ok = r.compare(one, other); object != "" || !ok {
				return object, ok
			}
		}
	}
	return "", true
}

// limits returns those by which pods of a configuration may act.
func (r *round) limits(name types.NamespacedName) []limits {
	if known, ok := r.next.limits[name]; ok {
		return known
	}
	c := r.byName[name]
	if c == nil {
		return nil
	}
	out := r.last.limits[name]
	if len(out) == 0 || out[0].of != c {
		now := limitsOf(c)
		out = append([]limits{now}, slices.DeleteFunc(slices.Clone(out), func(l limits) bool { return l.hash == now.hash })...)
	}
	if len(out) > 1 && r.nobodyActs(name) {
		out = out[:1]
	}
	r.next.limits[name] = out
	return out
}

func (r *round) compare(a, b limits) (object string, ok bool) {
	p := pair{a.hash, b.hash}
	if object, ok = r.last.known[p]; !ok {
		if r.end.IsZero() {
			r.end = time.Now().Add(compareWithin)
		}
		ctx, cancel := context.WithDeadline(r.ctx, r.end)
		defer cancel()
		var err error
		if object, err = validate.Overlap(ctx, a.of, b.of); err != nil {
			return "", false
		}
	}
	r.next.known[p] = object
	return object, true
}
