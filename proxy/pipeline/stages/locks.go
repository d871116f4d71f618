package stages

import (
	"errors"
	"net/http"
	"slices"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/ctrlmesh/ctrlmesh/proxy/lock"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
	"github.com/ctrlmesh/ctrlmesh/proxy/pipeline"
	"github.com/ctrlmesh/ctrlmesh/proxy/status"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/upstream"
)

// lockStage replaces the names of the locks in requests about them.
type lockStage struct {
	policy *Policy
	locks  lock.Set
	// standby: the locks keep their names, and are not written.
	standby bool
}

// newLockStage returns nil where requests cannot be about a lock.
func newLockStage(p *Policy, key match.Kind) pipeline.Stage {
	if len(p.Locks) == 0 || !mayLock(key) {
		return nil
	}
	return &lockStage{policy: p, locks: p.Locks, standby: p.Division.Standby}
}

// mayLock reports whether requests may be about locks of the operator. In member clusters there are
// none.
func mayLock(key match.Kind) bool {
	return !key.MemberCluster && key.Subresource == "" && lock.Kind(key.Group, key.Resource)
}

// urgent returns a function that reports whether a request is about a lock, by its head; nil: none is.
func urgent(p *Policy, key match.Kind) func(*pipeline.RequestInfo) bool {
	if s, ok := newLockStage(p, key).(*lockStage); ok {
		return s.urgent
	}
	return nil
}

func (s *lockStage) urgent(info *pipeline.RequestInfo) bool {
	return info.Verb != "watch" && slices.ContainsFunc(s.locks, func(l *lock.Lock) bool {
		return l.Named(info.Namespace, info.Name) || info.Verb == "create" && info.Namespace == l.Namespace()
	})
}

func (s *lockStage) Apply(x *pipeline.State) *pipeline.Outcome {
	switch {
	case len(x.Req.Info.Parts) == 2:
		return s.object(x)
	case x.Req.Info.Verb == "create":
		return s.create(x)
	}
	return s.collection(x)
}

// object handles a request whose path names the object.
func (s *lockStage) object(x *pipeline.State) *pipeline.Outcome {
	l := s.locks.Named(x.Req.Info.Namespace, x.Req.Info.Name)
	if l == nil {
		return nil
	}
	if s.standby && x.Plan.Key.Writes() {
		return s.policy.inStandby()
	}
	x.Out.Path = l.Path(x.Out.Path, 0)
	x.Lock.AnyVersion = x.Plan.Key.Writes()
	if x.Req.Info.Verb == "update" || x.Req.Info.Verb == "patch" {
		if _, refused := s.body(x, lock.Set{l}); refused != nil {
			return pipeline.Refusal(refused)
		}
	}
	return s.claim(x, l)
}

// create handles a request that may create a lock. Other bodies are not changed.
func (s *lockStage) create(x *pipeline.State) *pipeline.Outcome {
	candidates := s.locks.In(x.Req.Info.Namespace)
	if len(candidates) == 0 {
		return nil
	}
	l, refused := s.body(x, candidates)
	if refused != nil || l == nil {
		return pipeline.Refusal(refused)
	}
	if s.standby {
		return s.policy.inStandby()
	}
	return s.claim(x, l)
}

// collection handles a list, watch or deletecollection whose field selector names a lock.
func (s *lockStage) collection(x *pipeline.State) *pipeline.Outcome {
	for _, l := range s.locks.In(x.Req.Info.Namespace) {
		edited, byName, err := l.Query(x.Out.Query)
		if err != nil {
			return pipeline.Refusal(status.BadRequest("%v", err))
		}
		if !byName {
			continue
		}
		if s.standby && x.Plan.Key.Writes() {
			return s.policy.inStandby()
		}
		x.Out.Query = edited
		x.Lock.AnyVersion = x.Plan.Key.Writes()
		return s.claim(x, l)
	}
	return nil
}

// body reads the request's body, which is bounded, and replaces the name of the lock in it.
// It returns nil if the body names no lock.
func (s *lockStage) body(x *pipeline.State, candidates lock.Set) (*lock.Lock, *apierrors.StatusError) {
	raw, refused := x.ReadBody(lock.MaxObject)
	if refused != nil {
		return nil, refused
	}
	x.Out.Replace(raw)
	contentType := x.Out.Header.Get("Content-Type")
	if refused = x.Memory.Hold(lock.Weight(contentType, raw)); refused != nil {
		return nil, refused
	}
	holder, version := lock.ReadRequest(contentType, raw)
	x.Lock.Holder, x.Lock.AnyVersion = holder, version == "" && x.Req.Info.Verb != "create"
	for _, l := range candidates {
		out, err := l.Request(contentType, raw)
		switch {
		case errors.Is(err, lock.ErrUnsupported), errors.Is(err, lock.ErrYAML):
			return nil, status.UnsupportedMediaType("%v: the name of a %s in namespace %s must be read", err, x.Req.Info.Resource, x.Req.Info.Namespace)
		case err != nil:
			return nil, status.BadRequest("%v", err)
		case out.Lock:
			x.Out.Replace(out.Bytes)
			return l, nil
		}
	}
	return nil, nil
}

// claim makes x a request about a lock: on the locks' own connection, exempt from isolation,
// and with a response in which names can be replaced.
func (s *lockStage) claim(x *pipeline.State, l *lock.Lock) *pipeline.Outcome {
	accept, ok := lock.Accept(x.Out.Header.Get("Accept"))
	if !ok {
		return pipeline.Refusal(status.NotAcceptable("requests about the lock must accept JSON or Kubernetes protobuf"))
	}
	x.Out.Set("Accept", accept)
	x.Out.Drop("Accept-Encoding")
	x.Lock.Named, x.Exempt = l, true
	x.Responses.Only(s)
	return nil
}

// Respond restores the names in the response about a lock.
func (s *lockStage) Respond(x *pipeline.State, resp *upstream.Response) *pipeline.Outcome {
	contentType := resp.Get("Content-Type")
	if x.Req.Info.Verb == "watch" && resp.Status == http.StatusOK {
		s.noteRefusal(x, resp, nil)
		events, err := x.Lock.Named.Events(contentType, resp.Body)
		if err != nil {
			return x.Plan.BadResponse("the lock", err)
		}
		resp.Replace(events)
		return nil
	}
	body, end := readWhole(x, resp, "the lock")
	if end != nil {
		return end
	}
	s.noteRefusal(x, resp, body)
	if resp.Status/100 == 2 {
		written, resource := s.policy.env.Observations.LockWrites, x.Req.Info.Resource
		switch x.Req.Info.Verb {
		case "create", "update", "patch":
			written.Note(x.Lock.Named, s.locks, resource, x.Lock.Holder, lock.ReadHeld(contentType, body))
		case "delete", "deletecollection":
			written.Note(x.Lock.Named, s.locks, resource, "", lock.Held{})
		}
	}
	edited, err := x.Lock.Named.Answer(contentType, body)
	if err != nil {
		return x.Plan.BadResponse("the lock", err)
	}
	if x.Req.Method != http.MethodHead {
		resp.SetLength(len(edited))
	}
	x.Whole = edited
	return nil
}

// noteRefusal notes whether the apiserver refuses the lock. In standby, locks are not those of
// the shard.
func (s *lockStage) noteRefusal(x *pipeline.State, resp *upstream.Response, body []byte) {
	if s.standby {
		return
	}
	q := lock.Request{Lock: x.Lock.Named, Resource: x.Req.Info.Resource, Verb: x.Req.Info.Verb}
	s.policy.env.Observations.Refusals.Note(q, s.locks, resp.Status, resp.Get("Content-Type"), body, time.Now())
}
