package lock

import (
	"context"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/locks"
	"github.com/ctrlmesh/ctrlmesh/manager/validate"
)

// compareWithin bounds the comparisons of a round: selectors may be long, and renewals must not wait.
const compareWithin = time.Second

// overlaps remembers which configurations would both own an object. The zero value is ready to use.
type overlaps struct{ known map[pair]string }

// pair is two configurations that were compared.
type pair struct{ a, b revision }

type revision struct {
	uid        types.UID
	generation int64
}

func revisionOf(c *v1alpha1.ShardingConfig) revision { return revision{c.UID, c.Generation} }

// among returns the function that compares two of the configurations, for one round, and forgets the
// pairs that the last round did not compare. Two that could not be compared in time count as
// overlapping; the next round goes on.
func (o *overlaps) among(ctx context.Context, configs []*v1alpha1.ShardingConfig) locks.Overlap {
	before := o.known
	o.known = map[pair]string{}
	byName := map[types.NamespacedName]*v1alpha1.ShardingConfig{}
	for _, c := range configs {
		byName[client.ObjectKeyFromObject(c)] = c
	}
	began := time.Now()
	return func(a, b types.NamespacedName) string {
		one, other := byName[a], byName[b]
		if one == nil || other == nil {
			return ""
		}
		p := pair{revisionOf(one), revisionOf(other)}
		object, ok := before[p]
		if !ok {
			ctx, cancel := context.WithDeadline(ctx, began.Add(compareWithin))
			defer cancel()
			var err error
			if object, err = validate.Overlap(ctx, one, other); err != nil {
				return "objects, as far as selectors of this length could be compared"
			}
		}
		o.known[p] = object
		return object
	}
}
