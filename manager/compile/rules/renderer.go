// Package rules renders the rules of CircuitBreakers and FaultInjections for policies, and
// reports their errors. It is pure.
package rules

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

// Renderer renders rules and collects their errors. Its zero value is ready to use.
type Renderer struct {
	Errs field.ErrorList
	// Expressions is how many steps all regular expressions take at most for one request.
	Expressions int

	uncompiled int // how many expressions failed to compile
}

func (r *Renderer) invalid(path *field.Path, value any, format string, args ...any) {
	r.Errs = append(r.Errs, field.Invalid(path, value, fmt.Sprintf(format, args...)))
}

// Upper bounds on durations and rates.
const (
	maxDuration = 366 * 24 * time.Hour
	maxInterval = 366 * 24 * time.Hour
	maxWindow   = 24 * time.Hour
	maxDelay    = time.Hour

	maxRefill = 1e6 // tokens per second
)

func (r *Renderer) duration(in v1alpha1.Duration, most time.Duration, positive bool, path *field.Path) time.Duration {
	d, err := time.ParseDuration(string(in))
	switch {
	case err != nil:
		r.invalid(path, string(in), `must be a length of time, such as "500ms" or "1h30m", of less than 290 years`)
	case d < 0, positive && d == 0:
		r.invalid(path, string(in), "must be longer than 0s")
	case d > most:
		r.invalid(path, string(in), "must not be longer than %s", strings.TrimSuffix(strings.TrimSuffix(most.String(), "0s"), "0m"))
	default:
		return d
	}
	return 0
}

// threshold reads a percentage that must be more than 0.
func (r *Renderer) threshold(in v1alpha1.Percent, path *field.Path) float64 {
	before := len(r.Errs)
	p := r.percent(in, path)
	if p == 0 && len(r.Errs) == before {
		r.invalid(path, string(in), `must be more than "0", which has no effect: leave it out instead`)
	}
	return p
}

func (r *Renderer) percent(in v1alpha1.Percent, path *field.Path) float64 {
	p, err := strconv.ParseFloat(string(in), 64)
	if err != nil || !(p >= 0 && p <= 100) {
		r.invalid(path, string(in), `must be from "0" to "100"`)
		return 0
	}
	return p
}

// Lifetime checks the duration for which an object has effect.
func (r *Renderer) Lifetime(in v1alpha1.Duration, path *field.Path) {
	r.duration(in, maxDuration, true, path)
}

func (r *Renderer) count(n, least int64, path *field.Path) uint32 {
	if n < least || n > 1<<31-1 {
		r.invalid(path, n, "must be from %d to %d", least, 1<<31-1)
		return 0
	}
	return uint32(n)
}

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
