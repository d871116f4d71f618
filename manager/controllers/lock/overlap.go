package lock

import (
	"context"
	"crypto/sha256"
	"encoding/json"
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
	known  map[pair]string
	listed *controllers.Listed
	owned  map[types.NamespacedName]owned // of listed
}

// pair is the limits of two configurations that were compared.
type pair struct{ a, b owned }

// owned is the hash of limits.
type owned [sha256.Size]byte

// round is the comparisons of one round. Pairs that the last round did not need are forgotten.
type round struct {
	*overlaps
	ctx    context.Context //nolint:containedctx // of the round
	byName map[types.NamespacedName]*v1alpha1.ShardingConfig
	before map[pair]string
	end    time.Time // of comparisons; zero before the first
}

// round returns the comparisons of a round. Limits are those that pods act by now, which may be others
// than those of the spec.
func (o *overlaps) round(ctx context.Context, l *controllers.Listed) *round {
	if o.listed != l {
		o.listed, o.owned = l, map[types.NamespacedName]owned{}
	}
	r := &round{overlaps: o, ctx: ctx, byName: map[types.NamespacedName]*v1alpha1.ShardingConfig{}, before: o.known}
	for _, c := range l.Configs {
		r.byName[client.ObjectKeyFromObject(c)] = c
	}
	o.known = map[pair]string{}
	return r
}

// overlap implements [locks.Overlap].
func (r *round) overlap(a, b types.NamespacedName) (object string, ok bool) {
	one, other := r.byName[a], r.byName[b]
	if one == nil || other == nil {
		return "", true
	}
	p := pair{r.hash(one), r.hash(other)}
	if object, ok = r.before[p]; !ok {
		if object, ok = r.compare(one, other); !ok {
			return "", false
		}
	}
	r.known[p] = object
	return object, true
}

func (r *round) compare(a, b *v1alpha1.ShardingConfig) (object string, ok bool) {
	if r.end.IsZero() {
		r.end = time.Now().Add(compareWithin)
	}
	ctx, cancel := context.WithDeadline(r.ctx, r.end)
	defer cancel()
	object, err := validate.Overlap(ctx, a, b)
	return object, err == nil
}

func (r *round) hash(c *v1alpha1.ShardingConfig) owned {
	name := client.ObjectKeyFromObject(c)
	h, ok := r.owned[name]
	if !ok {
		limits, _ := json.Marshal(label.Limits(c)) // it cannot fail
		h = sha256.Sum256(limits)
		r.owned[name] = h
	}
	return h
}
