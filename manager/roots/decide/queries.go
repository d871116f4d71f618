package decide

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/query"
)

const (
	// maxExpression bounds a query whose variables are replaced, in bytes.
	maxExpression = 16 << 10
	// answerAge is how old an answer may be. Eight queries that take as long as they may are
	// evaluated in less time.
	answerAge = 2 * time.Minute
)

// judgeQueries asks the queries of the analysis of a shard. It returns which result exceeds a bound,
// and otherwise which queries lack an answer; both are empty if all results are within their bounds.
// since is when the shard began to soak. Answers from before it has soaked for the duration of the
// analysis do not count: many queries are about some time before.
func (d *deciding) judgeQueries(spec *v1alpha1.RolloutAnalysis, shard string, since time.Time) (failure, waits string) {
	d.rollout.queries = nil
	if len(spec.Queries) == 0 {
		return "", ""
	}
	least, config := duration(spec), d.v.Spec.Config
	pods := podsPattern(d.updated(shard))
	var lacking []string
	for _, q := range spec.Queries {
		expression, problem := expand(q.Query, config.Namespace, shard, pods)
		if problem == "" {
			asked := query.Query{Root: config.UID, Namespace: config.Namespace, Expression: expression}
			d.rollout.queries = append(d.rollout.queries, asked)
			var exceeds string
			exceeds, problem = judgeAnswer(q, d.v.Answers[asked], since.Add(least), d.v.now)
			failure = cmp.Or(failure, exceeds)
		}
		if problem != "" {
			lacking = append(lacking, strconv.Quote(q.Name))
			waits = cmp.Or(waits, fmt.Sprintf("waiting for query %q: %s", q.Name, problem))
		}
	}
	if len(lacking) > 1 {
		waits += "; also for " + firstOf(lacking[1:])
	}
	return failure, waits
}

// judgeAnswer returns which bound of a query an answer exceeds, and what it lacks; both are empty if
// it is within the bounds. Answers count if they are from after a time, and not out of date.
func judgeAnswer(q v1alpha1.AnalysisQuery, a query.Answer, after, now time.Time) (exceeds, lacks string) {
	switch {
	case a.At.Before(after):
		return "", cmp.Or(a.Problem, fmt.Sprintf("its result counts from %s on", after.UTC().Format(time.TimeOnly)))
	case now.Sub(a.At) > answerAge:
		return "", fmt.Sprintf("it has not been evaluated for %s", answerAge)
	case a.Numbers == 0:
		return "", a.Problem
	}
	if least, ok := bound(q.Min); ok && a.Min < least {
		return fmt.Sprintf("query %q is %s, and at least %s is required", q.Name, decimal(a.Min), *q.Min), ""
	}
	if most, ok := bound(q.Max); ok && a.Max > most {
		return fmt.Sprintf("query %q is %s, and at most %s is allowed", q.Name, decimal(a.Max), *q.Max), ""
	}
	return "", a.Problem
}

func bound(d *v1alpha1.Decimal) (value float64, ok bool) {
	if d == nil {
		return 0, false
	}
	value, err := strconv.ParseFloat(string(*d), 64)
	return value, err == nil
}

func decimal(value float64) string { return strconv.FormatFloat(value, 'g', -1, 64) }

// updated returns the sorted names of the pods of a shard that have the revision.
func (d *deciding) updated(shard string) (out []string) {
	for uid, m := range d.next.Members {
		if m.Shard == shard && d.v.exists(m) && d.v.hasRevision(d.v.Pods.ByUID[uid]) {
			out = append(out, m.Name)
		}
	}
	slices.Sort(out)
	return out
}

// expand replaces the variables of a query, and returns why it cannot. pods is a podsPattern.
func expand(text, namespace, shard, pods string) (expression, problem string) {
	namespace, shard = quote(namespace, literal), quote(shard, literal)
	size := len(text) + strings.Count(text, "$namespace")*len(namespace) + strings.Count(text, "$shard")*len(shard) + strings.Count(text, "$pods")*len(pods)
	if size > maxExpression {
		return "", fmt.Sprintf("with the names of its pods it exceeds %d KiB: use $pods less often, or match $shard", maxExpression>>10)
	}
	return strings.NewReplacer("$namespace", namespace, "$shard", shard, "$pods", pods).Replace(text), ""
}

// podsPattern returns a regular expression that matches names alone, and can be part of a longer one.
func podsPattern(names []string) string {
	out := make([]string, len(names))
	for i, name := range names {
		out[i] = quote(name, pattern)
	}
	return "(?:" + strings.Join(out, "|") + ")"
}

// quote returns a name as part of a string of PromQL. The result has no quotes and, for valid names,
// no backslashes, so that it means the same in strings with any of the three quotes, and ends none.
func quote(name string, other func(byte) string) string {
	var b strings.Builder
	for i := range len(name) {
		switch c := name[i]; {
		case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c >= '0' && c <= '9', c == '-', c == '_':
			b.WriteByte(c)
		default:
			b.WriteString(other(c))
		}
	}
	return b.String()
}

// literal quotes a byte in a string.
func literal(c byte) string {
	if c == '.' {
		return "."
	}
	return fmt.Sprintf(`\x%02x`, c)
}

// pattern quotes a byte in a string with a regular expression.
func pattern(c byte) string {
	if c == '.' {
		return "[.]"
	}
	return fmt.Sprintf(`\\x%02x`, c)
}
