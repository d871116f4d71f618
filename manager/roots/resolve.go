package roots

import (
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
)

// turn is how long one root is resolved before others have their turn.
const turn = time.Millisecond

// Resolver resolves roots in turns, so that none waits for one with costly patterns. The zero
// Resolver knows nothing. It is not safe for concurrent use.
type Resolver struct {
	layout.Resolver
	first int // which of the open roots has the first turn
}

// Resolved is the result of resolving roots.
type Resolved struct {
	// Errors are why roots, by uid, are not resolved: their shards keep what they own.
	Errors map[types.UID]error
	// Pending is whether further time would resolve more.
	Pending bool
	// Took is what each root took.
	Took map[types.NamespacedName]time.Duration
}

// Resolve adds, to the roots among configs, the names of the namespaces that they match. It takes
// little more than within, and goes on where the last call ended.
func (r *Resolver) Resolve(configs []*v1alpha1.ShardingConfig, namespaces map[string]labels.Set, within time.Duration) Resolved {
	out := Resolved{Errors: map[types.UID]error{}, Took: map[types.NamespacedName]time.Duration{}}
	deadline := time.Now().Add(within)
	r.Observe(namespaces)
	var all, open []*resolution // open are those that are not resolved yet, the next one first
	for _, c := range configs {
		if c.Spec.Root == nil {
			continue
		}
		x := &resolution{config: c, out: &out}
		x.measure(func() { x.Resolution = r.Begin(c.UID, &c.Spec) })
		all = append(all, x)
		if !x.Done() {
			open = append(open, x)
		}
	}
	r.Sweep()
	if n := len(open); n > 0 {
		r.first++
		open = slices.Concat(open[r.first%n:], open[:r.first%n])
	}
	for len(open) > 0 && time.Now().Before(deadline) {
		x := open[0]
		if open = open[1:]; !x.turn(deadline) {
			open = append(open, x)
		}
	}
	out.Pending = len(open) > 0
	for _, x := range all {
		x.measure(func() {
			if err := x.Finish(); err != nil {
				out.Errors[x.config.UID] = err
			}
		})
	}
	return out
}

// resolution is the resolution of one root.
type resolution struct {
	*layout.Resolution
	config *v1alpha1.ShardingConfig
	out    *Resolved
}

// turn reports whether the root is resolved.
func (x *resolution) turn(deadline time.Time) (done bool) {
	x.measure(func() {
		if end := time.Now().Add(turn); end.Before(deadline) {
			deadline = end
		}
		done = x.Step(func() bool { return time.Now().Before(deadline) })
	})
	return done
}

func (x *resolution) measure(do func()) {
	began := time.Now()
	do()
	x.out.Took[types.NamespacedName{Namespace: x.config.Namespace, Name: x.config.Name}] += time.Since(began)
}
