package rules

import (
	"slices"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

// Hidden reports whether rules ask for what of https is seen only where it is decrypted, or
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
