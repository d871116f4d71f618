package stages

import (
	"cmp"
	"context"
	"io"
	"net/http"
	"net/textproto"
	"net/url"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/bounds"
	"github.com/ctrlmesh/ctrlmesh/proxy/fault"
	"github.com/ctrlmesh/ctrlmesh/proxy/limit"
	"github.com/ctrlmesh/ctrlmesh/proxy/lock"
	"github.com/ctrlmesh/ctrlmesh/proxy/metrics"
	"github.com/ctrlmesh/ctrlmesh/proxy/pipeline"
	"github.com/ctrlmesh/ctrlmesh/proxy/relist"
	"github.com/ctrlmesh/ctrlmesh/proxy/status"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/header"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/upstream"
)

// pod applies policies to requests, without connections.
type pod struct {
	t       testing.TB
	env     *Env
	budgets pipeline.Budgets
	// api answers what passes, and what stages look up; nil: with an empty object.
	api      func(*upstream.Request) upstream.Response
	requests []sent   // that the apiserver got
	notified []string // reasons
}

// sent is a request that the apiserver gets.
type sent struct {
	Method, URI string
	Header      header.Fields
	Body        string
}

// answer is what a client gets.
type answer struct {
	*pipeline.State
	code   int           // 0: there is no response
	status metav1.Status // of a refusal
	body   string        // of a response, or the message of a refusal
	err    error         // why there is no response, or its body ends early
	reason meshv1.Refusal
}

// retryAfter is the header Retry-After.
func (a *answer) retryAfter() string {
	if d := a.status.Details; d != nil && d.RetryAfterSeconds > 0 {
		return strconv.Itoa(int(d.RetryAfterSeconds))
	}
	return ""
}

func newPod(t testing.TB) *pod {
	t.Helper()
	node, err := metrics.NewNode(prometheus.NewRegistry())
	require.NoError(t, err)
	p := &pod{t: t, env: &Env{
		Info: PodInfo{UID: "uid-1", Namespace: "ns", Name: "pod"}, ID: "ns/pod",
		Observations: Observations{LockWrites: lock.NewWrites()},
		Rules:        Rules{Limits: limit.NewStore(), Faults: fault.NewStore("uid-1")},
		Draining:     t.Context(), Ledger: relist.NewLedger(), Metrics: node,
		Unassigned: node.Workloads.Acquire("ns", "", ""),
	}}
	p.env.Notify = func(reason, _ string, _ ...any) { p.notified = append(p.notified, reason) }
	p.env.Get = func(ctx context.Context, r *upstream.Request) (upstream.Response, error) {
		if ctx.Err() != nil {
			return upstream.Response{}, ctx.Err()
		}
		return p.ask(r), nil
	}
	p.env.NoResponse = func(err error) *apierrors.StatusError {
		return status.New(http.StatusBadGateway, "BadGateway", 0, "%v", err)
	}
	p.env.Enter = func(*pipeline.State, *Policy) bool { return true }
	for _, a := range []*bounds.Account{&p.budgets.Held, &p.budgets.Long, &p.budgets.Lock, &p.budgets.Filtered} {
		a.Pool, a.Own = bounds.NewPool(pipeline.MaxHeld, pipeline.OwnHeld), pipeline.OwnHeld
	}
	p.budgets.Pod, p.budgets.Bound = p.env.ID, func(string) {}
	return p
}

// policy puts a policy in force.
func (p *pod) policy(s *meshv1.Sharding) *Policy {
	p.t.Helper()
	return p.set(&meshv1.PodPolicy{Uid: "uid-1", Workload: "operator", Version: "v", Sharding: s})
}

// set is policy of a whole one.
func (p *pod) set(m *meshv1.PodPolicy) *Policy {
	p.t.Helper()
	next, err := Compile(p.env, m)
	require.NoError(p.t, err)
	old := p.env.Policy.Load()
	next.Acquire()
	next.Enforce()
	p.env.Ledger.Change(next, time.Now(), func() { p.env.Policy.Store(next) })
	old.Release()
	return next
}

// ask has the apiserver answer a request.
func (p *pod) ask(r *upstream.Request) upstream.Response {
	one := sent{r.Method, r.Target, r.Header, ""}
	if r.Body != nil {
		b, err := io.ReadAll(r.Body)
		require.NoError(p.t, err)
		one.Body = string(b)
	}
	p.requests = append(p.requests, one)
	if p.api != nil {
		return p.api(r)
	}
	return response(http.StatusOK, typeJSON, "{}")
}

// last is the last request that the apiserver got.
func (p *pod) last() sent {
	p.t.Helper()
	require.NotEmpty(p.t, p.requests, "nothing reached the apiserver")
	return p.requests[len(p.requests)-1]
}

func response(code int, contentType, body string) upstream.Response {
	return upstream.Response{Status: code, Header: header.Fields{{Name: "Content-Type", Value: contentType}}, Body: io.NopCloser(strings.NewReader(body))}
}

// state is a request that no stage has seen.
func (p *pod) state(method, target, body string, head ...string) *pipeline.State {
	p.t.Helper()
	u, err := url.ParseRequestURI(target)
	require.NoError(p.t, err)
	x := &pipeline.State{
		Req: pipeline.Request{
			Ctx: p.t.Context(), Method: method, Target: target, Path: u.Path, Escaped: u.EscapedPath(), Query: u.RawQuery, Host: "kubernetes",
			Body: pipeline.Body{Rest: strings.NewReader(body)}, Length: int64(len(body)), Proto: "HTTP/1.1",
		},
		Memory: pipeline.Holding{Budgets: &p.budgets, Budget: &p.budgets.Held},
	}
	for i := 0; i < len(head); i += 2 {
		x.Req.Header = append(x.Req.Header, header.Field{Name: textproto.CanonicalMIMEHeaderKey(head[i]), Value: head[i+1]})
	}
	return x
}

// do has the stages decide on a request, and on the response if it passes.
func (p *pod) do(method, target, body string, header ...string) answer {
	p.t.Helper()
	return p.decide(p.state(method, target, body, header...))
}

func (p *pod) decide(x *pipeline.State) answer {
	p.t.Helper()
	pol := p.env.Policy.Load()
	defer func() {
		x.Resumption.Leave()
		x.Allowed.Ticket.Leave()
		pol.CountWithheld(x)
		x.Memory.Release()
		x.Req.Body.Free()
	}()
	a := answer{State: x}
	end := pol.Evaluate(x)
	var resp upstream.Response
	if end == nil {
		target := x.Out.Path
		if x.Out.Query != "" {
			target += "?" + x.Out.Query
		}
		resp = p.ask(&upstream.Request{Method: x.Req.Method, Target: target, Header: x.Out.Header, Body: x.Out.Body, Length: x.Out.Length})
		end = x.Responses.Respond(x, &resp)
	}
	if end != nil {
		a.code, a.reason, a.err = end.Code, end.Reason, end.Err
		if end.Status != nil {
			a.status = end.Status.ErrStatus
			a.code, a.body = int(a.status.Code), a.status.Message
		}
		return a
	}
	b, err := io.ReadAll(resp.Body)
	a.code, a.body, a.err = resp.Status, cmp.Or(string(x.Whole), string(b)), err
	return a
}

// observed are the locks that requests have shown, and the policy does not name.
func (p *pod) observed() []lock.Observed {
	pol := p.env.Policy.Load()
	if pol.Would != nil {
		pol = pol.Would
	}
	return p.env.Observations.Observed.Except(pol.Locks)
}
