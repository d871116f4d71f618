package rules

import (
	"slices"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

// Hidden reports whether rules match properties of https requests that are visible only
// after decryption, or count such requests.
func Hidden(b *meshv1.Breaker) bool {
	return slices.ContainsFunc(b.GetRules(), func(r *meshv1.LimitRule) bool {
		forced := r.Trigger == meshv1.Trigger_TRIGGER_FORCE_OPENED || r.Trigger == meshv1.Trigger_TRIGGER_FORCE_CLOSED
		return hidden(r.Http, !forced || len(r.UserAgents) > 0)
	}) || slices.ContainsFunc(b.GetIntercepts(), func(r *meshv1.InterceptRule) bool {
		return hidden(r.Http, false)
	})
}

// HiddenOfFaults is Hidden for the rules of a FaultInjection, which inject faults into
// single requests.
func HiddenOfFaults(rules []*meshv1.FaultRule) bool {
	return slices.ContainsFunc(rules, func(r *meshv1.FaultRule) bool {
		return hidden(r.Http, r.Abort != nil || r.Reset_.GetAfterAnswer() || r.Truncate != nil || r.SlowBody != nil)
	})
}

// hidden reports whether matches need decrypted https. requests is set if the rule applies
// to requests in any case, and not to connections.
func hidden(matches []*meshv1.HttpMatch, requests bool) bool {
	return slices.ContainsFunc(matches, func(m *meshv1.HttpMatch) bool {
		return m.Scheme != "http" && (requests || m.Path != nil || len(m.Methods) > 0 || len(m.Headers) > 0)
	})
}
