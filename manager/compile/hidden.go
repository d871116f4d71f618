package compile

import (
	"slices"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

// ToldBreaker is what pods may be told of a CircuitBreaker.
func ToldBreaker(c *v1alpha1.CircuitBreaker) *meshv1.Breaker { return newBreaker(c).all() }

// ToldFaults is the same of a FaultInjection.
func ToldFaults(f *v1alpha1.FaultInjection) []*meshv1.FaultRule { return newInjection(f).all.rules }

// Hidden tells whether rules ask for what of https is seen only where it is decrypted, or
// count its requests.
func Hidden(b *meshv1.Breaker) bool {
	return slices.ContainsFunc(b.GetRules(), func(r *meshv1.LimitRule) bool {
		forced := r.Trigger == meshv1.Trigger_TRIGGER_FORCE_OPENED || r.Trigger == meshv1.Trigger_TRIGGER_FORCE_CLOSED
		return hidden(r.Http, !forced || len(r.UserAgents) > 0)
	}) || slices.ContainsFunc(b.GetIntercepts(), func(r *meshv1.InterceptRule) bool {
		return hidden(r.Http, false)
	})
}

// HiddenOfFaults is the same of a FaultInjection's, which harm single requests.
func HiddenOfFaults(rules []*meshv1.FaultRule) bool {
	return slices.ContainsFunc(rules, func(r *meshv1.FaultRule) bool {
		return hidden(r.Http, r.Abort != nil || r.Reset_.GetAfterAnswer() || r.Truncate != nil || r.SlowBody != nil)
	})
}

// hidden tells so of matches. requests: they are about those anyway, not connections.
func hidden(matches []*meshv1.HttpMatch, requests bool) bool {
	return slices.ContainsFunc(matches, func(m *meshv1.HttpMatch) bool {
		return m.Scheme != "http" && (requests || m.Path != nil || len(m.Methods) > 0 || len(m.Headers) > 0)
	})
}
