package proxy

import (
	"errors"
	"net/http"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apirequest "k8s.io/apiserver/pkg/endpoints/request"

	"github.com/ctrlmesh/ctrlmesh/proxy/lock"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
	"github.com/ctrlmesh/ctrlmesh/proxy/status"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/upstream"
)

// lockStage replaces the names of the locks in requests about them.
type lockStage struct {
	policy *policy
	locks  lock.Set
	// standby: the locks keep their names, and are not written.
	standby bool
}

// newLockStage returns nil where requests cannot be about a lock.
func newLockStage(p *policy, key match.Kind) *lockStage {
	if len(p.locks) == 0 || key.Subresource != "" || !lock.Kind(key.Group, key.Resource) {
		return nil
	}
	return &lockStage{policy: p, locks: p.locks, standby: p.Standby}
}

// urgent reports whether a request is about a lock, by its head.
func (s *lockStage) urgent(info *apirequest.RequestInfo) bool {
	if info.Verb == "watch" {
		return false
	}
	for _, l := range s.locks {
		if l.Named(info.Namespace, info.Name) || info.Verb == "create" && info.Namespace == l.Namespace() {
			return true
		}
	}
	return false
}

func (s *lockStage) apply(x *state) *outcome {
	switch {
	case len(x.req.info.Parts) == 2:
		return s.object(x)
	case x.req.info.Verb == "create":
		return s.create(x)
	}
	return s.collection(x)
}

// object handles a request whose path names the object.
func (s *lockStage) object(x *state) *outcome {
	l := s.locks.Named(x.req.info.Namespace, x.req.info.Name)
	if l == nil {
		return nil
	}
	if s.standby && x.plan.key.Writes() {
		return s.policy.inStandby()
	}
	x.out.path = l.Path(x.out.path, 0)
	if x.req.info.Verb == "update" || x.req.info.Verb == "patch" {
		if _, refused := s.body(x, lock.Set{l}); refused != nil {
			return refusal(refused)
		}
	}
	return s.claim(x, l)
}

// create handles a request that may create a lock. Other bodies are not changed.
func (s *lockStage) create(x *state) *outcome {
	candidates := s.locks.In(x.req.info.Namespace)
	if len(candidates) == 0 {
		return nil
	}
	l, refused := s.body(x, candidates)
	if refused != nil || l == nil {
		return refusal(refused)
	}
	if s.standby {
		return s.policy.inStandby()
	}
	return s.claim(x, l)
}

// collection handles a list, watch or deletecollection whose field selector names a lock.
func (s *lockStage) collection(x *state) *outcome {
	for _, l := range s.locks {
		if l.Namespace() != x.req.info.Namespace {
			continue
		}
		edited, byName, err := l.Query(x.out.query)
		if err != nil {
			return refusal(status.BadRequest("%v", err))
		}
		if !byName {
			continue
		}
		if s.standby && x.plan.key.Writes() {
			return s.policy.inStandby()
		}
		x.out.query = edited
		return s.claim(x, l)
	}
	return nil
}

// body reads the request's body, which is bounded, and replaces the name of the lock in it.
// It returns nil if the body names no lock.
func (s *lockStage) body(x *state, candidates lock.Set) (*lock.Lock, *apierrors.StatusError) {
	raw, refused := x.readBody(lock.MaxObject)
	if refused != nil {
		return nil, refused
	}
	x.out.replace(raw)
	for _, l := range candidates {
		out, err := l.Request(x.out.header.get("Content-Type"), raw)
		switch {
		case errors.Is(err, lock.ErrUnsupported):
			return nil, status.UnsupportedMediaType("%v: the name of a %s in namespace %s must be read", err, x.req.info.Resource, x.req.info.Namespace)
		case err != nil:
			return nil, status.BadRequest("%v", err)
		case out.Lock:
			x.out.replace(out.Bytes)
			return l, nil
		}
	}
	return nil, nil
}

// claim makes x a request about a lock: on the locks' own connection, exempt from isolation,
// and with a response in which names can be replaced.
func (s *lockStage) claim(x *state, l *lock.Lock) *outcome {
	accept, ok := lock.Accept(x.out.header.get("Accept"))
	if !ok {
		return refusal(status.NotAcceptable("requests about the lock must accept JSON or Kubernetes protobuf"))
	}
	x.out.set("Accept", accept)
	x.out.drop("Accept-Encoding")
	x.lock, x.exempt = l, true
	x.responses.only(s)
	return nil
}

// respond restores the names in the response about a lock.
func (s *lockStage) respond(x *state, resp *upstream.Response) *outcome {
	contentType := resp.Get("Content-Type")
	if x.req.info.Verb == "watch" && resp.Status == http.StatusOK {
		events, err := x.lock.Events(contentType, resp.Body)
		if err != nil {
			return x.plan.badResponse("the lock", err)
		}
		resp.Replace(events)
		return nil
	}
	body, err := x.readAll(resp.Body, maxLockAnswer)
	if refused, ok := errors.AsType[*apierrors.StatusError](err); ok {
		return x.plan.badResponse("the lock", refused)
	}
	if err != nil {
		return failure(err)
	}
	if resp.Status/100 == 2 {
		written, resource := s.policy.env.lockWrites, x.req.info.Resource
		switch x.req.info.Verb {
		case "create", "update", "patch":
			written.Note(x.lock, s.locks, resource, lock.ReadHeld(contentType, body))
		case "delete", "deletecollection":
			written.Note(x.lock, s.locks, resource, lock.Held{})
		}
	}
	edited, err := x.lock.Answer(contentType, body)
	if err != nil {
		return x.plan.badResponse("the lock", err)
	}
	if x.req.method != http.MethodHead {
		setLength(resp.Header, len(edited))
	}
	x.whole = edited
	return nil
}

// maxLockAnswer bounds the response to a lock request, in bytes.
const maxLockAnswer = 4 * lock.MaxObject
