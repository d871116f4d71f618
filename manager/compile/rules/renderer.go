// Package rules renders the rules of CircuitBreakers and FaultInjections for policies, and
// reports their errors. It is pure.
package rules

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

// Renderer renders rules and collects their errors. Its zero value is ready to use.
type Renderer struct {
	Errs field.ErrorList
	// Expressions is the total size of all regular expressions.
	Expressions int
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
