package traffic

import (
	"context"
	"errors"
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	tallyv1 "github.com/ctrlmesh/ctrlmesh/tests/operators/tally/v1"
)

// breakers are the names of the CircuitBreakers of the operator.
var breakers = []string{"cap", "opens"}

// limit creates a CircuitBreaker that limits the operator's writes and, once it has refused
// some, one that opens when too many of them fail: while that is open, the first has nothing to
// refuse. The returned function deletes them.
func (o *faultTest) limit(ctx context.Context) (end func() error, err error) {
	writes := []meshv1alpha1.ResourceRule{{
		APIGroups: []string{tallyv1.GroupVersion.Group}, Resources: []string{"tallies/status"}, Verbs: []string{"update"}, Namespaces: []string{"*"},
	}}
	sleeps := meshv1alpha1.Duration("1s")
	rules := map[string]meshv1alpha1.Limiting{
		"cap": {Bucket: &meshv1alpha1.Bucket{Burst: 20, Interval: "1s", Limit: 20}, TriggerPolicy: meshv1alpha1.TriggerLimiterOnly},
		"opens": {
			Trip:          &meshv1alpha1.Trip{Window: "5s", MinRequests: 5, ErrorPercent: "5"},
			RecoverPolicy: &meshv1alpha1.RecoverPolicy{Type: meshv1alpha1.RecoverSleepingWindow, SleepingWindowSize: &sleeps},
		},
	}
	var made []*meshv1alpha1.CircuitBreaker
	end = func() (err error) {
		for _, b := range made {
			err = errors.Join(err, client.IgnoreNotFound(o.Delete(context.WithoutCancel(ctx), b)))
		}
		return err
	}
	for _, name := range breakers {
		rule := rules[name]
		rule.Name, rule.ResourceRules = "writes", writes
		b := &meshv1alpha1.CircuitBreaker{
			ObjectMeta: metav1.ObjectMeta{Namespace: o.Home, Name: name},
			Spec:       meshv1alpha1.CircuitBreakerSpec{Selector: o.selector(), RateLimitings: []meshv1alpha1.Limiting{rule}},
		}
		if err := o.CreateAll(ctx, b); err != nil {
			return end, err
		}
		made = append(made, b)
		if err := o.suite.waitBreakerInForce(ctx, b); err != nil {
			return end, err
		}
		if name == breakers[0] {
			if _, err := o.refusals(ctx, 1); err != nil {
				return end, err
			}
		}
	}
	return end, nil
}

// refusals waits until so many CircuitBreakers have refused requests. It returns how many
// requests each has refused.
func (o *faultTest) refusals(ctx context.Context, enough int) (by map[string]int, err error) {
	err = o.Until(ctx, "refusals", func(ctx context.Context) (err error) {
		if by, err = o.SumBy(ctx, "ctrlmesh_limited_requests_total", "circuitbreaker", map[string]string{"namespace": o.Home}); err != nil {
			return err
		}
		if len(by) < enough {
			return fmt.Errorf("of %d CircuitBreakers %d did: %s", len(breakers), len(by), format(by))
		}
		return nil
	})
	return by, err
}

// waitBreakerInForce waits until a CircuitBreaker is in force as it was last written.
func (s *suite) waitBreakerInForce(ctx context.Context, b *meshv1alpha1.CircuitBreaker) error {
	return s.UntilObject(ctx, b.Name+" to be in force", b, func() error {
		return inForce(b.Generation, b.Status.ObservedGeneration, b.Status.Pods, b.Status.PodsInForce)
	})
}

// waitRefusals waits until enough CircuitBreakers have refused requests, and counts these.
func (o *faultTest) waitRefusals(ctx context.Context, enough int) error {
	by, err := o.refusals(ctx, enough)
	for name, n := range by {
		o.suite.counts.limited[name] += n
	}
	o.Logf("  refused by CircuitBreaker: %v", format(by))
	return err
}
