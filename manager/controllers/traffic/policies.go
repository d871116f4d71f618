package traffic

import (
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	kruise "github.com/ctrlmesh/ctrlmesh/api/kruise/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/controllers"
	"github.com/ctrlmesh/ctrlmesh/manager/dialect/serve"
	"github.com/ctrlmesh/ctrlmesh/manager/status"
)

// policies queues the writes of the statuses of TrafficPolicies. It returns the CircuitBreakers
// that they stand for, of which there are no objects.
func (r *round) policies(c *controllers.Compiled) (translated map[types.UID]bool) {
	if len(c.TrafficPolicies) == 0 {
		return nil
	}
	compiled := make(map[types.UID]compile.Breaker, len(c.Breakers))
	for _, b := range c.Breakers {
		compiled[b.UID] = b
	}
	translated = map[types.UID]bool{}
	for _, p := range c.TrafficPolicies {
		r.policy(p, compiled)
		for _, b := range p.Breakers {
			translated[b.UID] = true
		}
	}
	return translated
}

func (r *round) policy(p serve.Policy, compiled map[types.UID]compile.Breaker) {
	pace, current := newest(r, p.TrafficPolicy, &kruise.TrafficPolicy{})
	if pace == nil {
		return
	}
	in := status.PolicyInput{Namespace: p.Namespace, Generation: p.Generation, Before: current.Status, TrafficInput: r.in}
	if p.Problem != "" {
		in.Problem = &compile.Problem{Reason: v1alpha1.ReasonInvalid, Message: p.Problem}
	}
	for _, part := range p.Remainder {
		in.Problems = append(in.Problems, &compile.Problem{Reason: v1alpha1.ReasonNoEffect, Message: part})
	}
	for _, b := range p.Breakers {
		if is, ok := compiled[b.UID]; ok {
			in.Breakers = append(in.Breakers, is)
		}
	}
	before, next := current.Status, status.OfPolicy(in)
	r.opened[client.ObjectKeyFromObject(p)] = next.Opened
	if equality.Semantic.DeepEqual(before, next) {
		return
	}
	gap := writeGap
	if status.CountsAlone(before, next) {
		gap = countGap
	}
	updated := current.DeepCopy()
	updated.Status = next
	r.writes = append(r.writes, statusWrite{pace, current, updated, gap, func() { r.reportTurns(pace, updated, &updated.Status, before) }})
}
