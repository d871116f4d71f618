package egress

import (
	"context"
	"log/slog"
	"net/http"
	"time"

	"github.com/ctrlmesh/ctrlmesh/proxy/fault"
	"github.com/ctrlmesh/ctrlmesh/proxy/limit"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
)

// line is what the proxy counts and logs about a request or a connection.
type line struct {
	s        *Server
	c        *conn
	protocol string
	asked    []match.HTTP
	verdict  string
	by       string // CircuitBreaker and rule
	code     int
	err      error

	ticket    limit.Ticket
	injecting *fault.Faults // nil: none
}

// refusal is the answer to a request that the rules refuse.
type refusal struct {
	code    int
	retry   int // in seconds; 0: none
	message string
}

// subject is what rules decide by, about a request or a connection.
type subject struct {
	flow      *flow
	around    connect // rules that matched it are skipped
	userAgent string
}

// ruleStages are the decisions of rules, in order. The first that refuses is the last.
var ruleStages = []func(*line, *Policy, *subject) *refusal{(*line).intercept, (*line).limit, (*line).fault}

// apply applies the rules. It returns nil if they allow the request or connection.
func (l *line) apply(p *Policy, s *subject) *refusal {
	if p == nil {
		return nil
	}
	defer l.s.turn(p)()
	for _, stage := range ruleStages {
		if refused := stage(l, p, s); refused != nil {
			return refused
		}
	}
	return nil
}

// intercept applies the rules that allow and deny.
func (l *line) intercept(p *Policy, s *subject) *refusal {
	d := p.refuses(s.flow)
	switch {
	case d == nil:
		return nil
	case d.long > 0:
		l.verdict = VerdictBound
		return &refusal{code: http.StatusRequestURITooLong, message: d.message(l.s.Namespace)}
	}
	l.verdict, l.by = VerdictDenied, d.breaker+"/"+d.rule
	if d.unseen {
		l.verdict = VerdictUnseen
	}
	return &refusal{code: http.StatusForbidden, message: d.message(l.s.Namespace)}
}

// limit applies the rules that limit.
func (l *line) limit(p *Policy, s *subject) *refusal {
	if s.flow.within {
		return nil
	}
	ticket, above := p.limits.TakeHTTP(time.Now(), s.around.ticket, s.userAgent, l.asked...)
	l.ticket = ticket
	if above == nil {
		return nil
	}
	l.s.Limited(above)
	code := http.StatusTooManyRequests
	l.verdict, l.by = VerdictLimited, above.Breaker+"/"+above.Rule
	if above.Opened {
		l.verdict, code = VerdictOpened, http.StatusServiceUnavailable
	}
	return &refusal{code, above.RetrySeconds(), above.Message(l.s.Namespace)}
}

// fault decides which faults are to be injected. It refuses nothing.
func (l *line) fault(p *Policy, s *subject) *refusal {
	if !s.flow.within && !l.s.http.Draining() { // the next server continues with the rules' counts
		l.injecting = p.faults.DecideHTTP(time.Now(), s.around.met, l.asked...)
	}
	return nil
}

// end reports to the rules how the request or connection ended.
func (l *line) end(o limit.Outcome) {
	for _, by := range l.injecting.Done(false) {
		l.s.Injected(*by)
	}
	l.ticket.Done(time.Now(), o)
}

// done counts and logs the line. It never logs a path, a header or a body.
func (l *line) done() {
	l.s.Count(l.protocol, l.verdict)
	if !l.s.Log.Enabled(context.Background(), slog.LevelDebug) {
		return
	}
	host := ""
	if len(l.asked) > 0 {
		host = l.asked[0].Host
	}
	attrs := []slog.Attr{
		slog.String("pod", l.s.Pod), slog.String("uid", l.s.UID),
		slog.String("protocol", l.protocol),
		slog.String("host", host), slog.String("to", l.c.target.to.String()),
		slog.String("verdict", l.verdict),
	}
	if l.by != "" {
		attrs = append(attrs, slog.String("rule", l.by))
	}
	if l.code != 0 {
		attrs = append(attrs, slog.Int("code", l.code))
	}
	if l.injecting != nil && len(l.injecting.Rules) > 0 {
		attrs = append(attrs, slog.Any("faults", l.injecting.Rules))
	}
	if l.err != nil {
		attrs = append(attrs, slog.String("error", l.err.Error()))
	}
	l.s.Log.LogAttrs(context.Background(), slog.LevelDebug, "egress", attrs...)
}
