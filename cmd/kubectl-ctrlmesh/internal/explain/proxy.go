package explain

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/bounds"
	"github.com/ctrlmesh/ctrlmesh/proxy/fault"
	"github.com/ctrlmesh/ctrlmesh/proxy/isolation"
	"github.com/ctrlmesh/ctrlmesh/proxy/limit"
	"github.com/ctrlmesh/ctrlmesh/proxy/lock"
	"github.com/ctrlmesh/ctrlmesh/proxy/metrics"
	"github.com/ctrlmesh/ctrlmesh/proxy/pipeline"
	"github.com/ctrlmesh/ctrlmesh/proxy/pipeline/stages"
	"github.com/ctrlmesh/ctrlmesh/proxy/relist"
	"github.com/ctrlmesh/ctrlmesh/proxy/status"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/header"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/upstream"
)

// evaluated is what the stages of the proxy decide about a request, without rules of traffic.
type evaluated struct {
	policy *stages.Policy
	x      *pipeline.State
	// end is the refusal; nil: the request passes.
	end *pipeline.Outcome
	// looked reports whether the uid of the object was asked for.
	looked bool
}

// evaluate evaluates a request as the proxy of a pod does, under a policy that is the pod's first: no
// cache misses anything. A bound of the proxy is never reached.
func evaluate(m *meshv1.PodPolicy, q *Request) (*evaluated, error) {
	m = proto.CloneOf(m)
	m.Traffic = nil
	d := &evaluated{x: &pipeline.State{}}
	e, err := d.environment(q)
	if err != nil {
		return nil, err
	}
	if d.policy, err = stages.Compile(e, m); err != nil {
		return nil, fmt.Errorf("compiling the policy of the pod: %w", err)
	}
	d.policy.Acquire()
	e.Ledger.Change(d.policy, time.Time{}, func() { e.Policy.Store(d.policy) })
	if d.x.Req, err = q.build(m.GetClusterPaths()); err != nil {
		return nil, err
	}
	d.charge(e.ID)
	if d.end = d.policy.Evaluate(d.x); d.end == nil && d.readsByUID() {
		d.looked = true
		answer := q.object()
		d.end = d.x.Responses.Respond(d.x, &answer)
	}
	switch {
	case d.looked && q.Name == "":
		return nil, errors.New("the root assigns objects by their uids (key: Object): name the object")
	case d.looked && q.Unread != nil:
		return nil, fmt.Errorf("the owner follows from the uid of %s %s: %w: you need permission to get it", q.Resource, q.Name, q.Unread)
	case d.end != nil && (d.end.Kind != pipeline.Refuse || d.end.Status == nil):
		return nil, errors.New("the proxy would not answer such a request") // only a policy that changes meanwhile leads here
	}
	return d, nil
}

// environment returns what the stages need of a pod.
func (d *evaluated) environment(q *Request) (*stages.Env, error) {
	node, err := metrics.NewNode(nil)
	if err != nil {
		return nil, err
	}
	return &stages.Env{
		Info: stages.PodInfo{Namespace: q.Pod.Namespace, Name: q.Pod.Name}, ID: q.Pod.String(),
		Observations: stages.Observations{LockWrites: lock.NewWrites()},
		Rules:        stages.Rules{Limits: limit.NewStore(), Faults: fault.NewStore("")},
		Draining:     context.Background(), Ledger: relist.NewLedger(),
		Metrics: node, Unassigned: node.Workloads.Acquire(q.Pod.Namespace, "", ""),
		Leaf:   func() (*tls.Certificate, error) { return nil, errors.New("there is no CA here") },
		Notify: func(string, string, ...any) {},
		Get: func(context.Context, *upstream.Request) (upstream.Response, error) {
			d.looked = true
			return q.object(), q.Unread
		},
		NoResponse: func(err error) *apierrors.StatusError { return status.Unavailable(1, "%v", err) },
		Enter:      func(*pipeline.State, *stages.Policy) bool { return true },
	}, nil
}

// object returns the apiserver's answer about the object of the request.
func (q *Request) object() upstream.Response {
	out := upstream.Response{Status: 200, Header: header.Fields{{Name: "Content-Type", Value: "application/json"}}}
	if q.UID == "" {
		out.Status = 404
	}
	body, _ := json.Marshal(metav1.PartialObjectMetadata{ // strings always marshal
		TypeMeta:   metav1.TypeMeta{APIVersion: "meta.k8s.io/v1", Kind: "PartialObjectMetadata"},
		ObjectMeta: metav1.ObjectMeta{Namespace: q.Namespace, Name: q.Name, UID: q.UID},
	})
	out.Body = io.NopCloser(strings.NewReader(string(body)))
	return out
}

// charge gives the request the memory that it takes in the proxy.
func (d *evaluated) charge(pod string) {
	account := func() bounds.Account {
		return bounds.Account{Pool: bounds.NewPool(pipeline.MaxHeld, pipeline.OwnHeld), Own: pipeline.OwnHeld}
	}
	d.x.Memory.Budgets = &pipeline.Budgets{Pod: pod, Held: account(), Long: account(), Lock: account(), Filtered: account(), Bound: func(string) {}}
	d.x.Memory.Budget, d.x.Memory.Held = &d.x.Memory.Budgets.Held, d.x.Req.Weight()
	d.x.Memory.Budget.Take(d.x.Memory.Held)
}

// readsByUID reports whether the answer of the apiserver decides: it has the uid of the object.
func (d *evaluated) readsByUID() bool {
	if d.x.Lock.Named != nil || d.x.Exempt || d.x.Plan.Key.MemberCluster || len(d.x.Req.Info.Parts) != 2 || d.x.Req.Info.Verb != "get" {
		return false
	}
	f := d.policy.Division.Fence(d.x.Plan.Key)
	return f != nil && f.By == isolation.ByUID && !f.Observe
}
