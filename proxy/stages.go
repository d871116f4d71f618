package proxy

import (
	"bytes"
	"errors"
	"net/http"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apiserver/pkg/endpoints/request"

	"github.com/ctrlmesh/ctrlmesh/proxy/lock"
	"github.com/ctrlmesh/ctrlmesh/proxy/narrow"
	"github.com/ctrlmesh/ctrlmesh/proxy/status"
)

// scopeStage narrows a list, watch or deletecollection to the shard's objects.
// The lock, asked for by its name, is nobody's object but the shard's.
type scopeStage struct{ selector *narrow.Selector }

func (s *scopeStage) apply(x *exchange) *apierrors.StatusError {
	if x.lock != nil {
		return nil
	}
	narrowed, err := s.selector.Narrow(x.query)
	if err != nil {
		return status.BadRequest("%v", err)
	}
	x.query = narrowed
	return nil
}

// lockStage exchanges the lock's name in requests about it.
type lockStage struct{ lock *lock.Lock }

// concerns tells whether a request for one object is about the lock, or may be.
func (s *lockStage) concerns(info *request.RequestInfo) bool {
	return s.lock.Named(info.Namespace, info.Name) || info.Verb == "create" && info.Namespace == s.lock.Namespace()
}

func (s *lockStage) apply(x *exchange) *apierrors.StatusError {
	if x.info.Namespace != s.lock.Namespace() {
		return nil
	}
	inPath := len(x.info.Parts) == 2
	switch {
	case inPath && s.lock.Named(x.info.Namespace, x.info.Name):
		x.path = s.lock.Path(x.path, 0)
	case inPath:
		return nil
	case x.info.Verb == "create":
		return s.create(x)
	default: // list, watch, deletecollection
		edited, byName, err := s.lock.Query(x.query)
		if err != nil {
			return status.BadRequest("%v", err)
		}
		if !byName {
			return nil
		}
		x.query = edited
	}
	if x.info.Verb == "update" || x.info.Verb == "patch" {
		if _, refused := s.body(x); refused != nil {
			return refused
		}
	}
	return s.claim(x)
}

// create looks whether the object to be created is the lock. If not, the bytes
// go on as they came.
func (s *lockStage) create(x *exchange) *apierrors.StatusError {
	isLock, refused := s.body(x)
	if refused != nil || !isLock {
		return refused
	}
	return s.claim(x)
}

// body reads the request's body, bounded, and exchanges the name in it.
func (s *lockStage) body(x *exchange) (isLock bool, refused *apierrors.StatusError) {
	raw, refused := x.readBody(lock.MaxObject)
	if refused != nil {
		return false, refused
	}
	out, err := s.lock.Request(x.r.Header.Get("Content-Type"), raw)
	switch {
	case errors.Is(err, lock.ErrUnsupported):
		return false, status.UnsupportedMediaType("%v: the name of a %s in namespace %s must be read", err, x.info.Resource, x.info.Namespace)
	case err != nil:
		return false, status.BadRequest("%v", err)
	}
	x.body, x.length = bytes.NewReader(out.Bytes), int64(len(out.Bytes))
	return out.Lock, nil
}

// claim makes x a request about the lock: on the lock's own connection, with an
// answer whose names can be exchanged back.
func (s *lockStage) claim(x *exchange) *apierrors.StatusError {
	accept, ok := lock.Accept(x.r.Header.Get("Accept"))
	if !ok {
		return status.NotAcceptable("the lock is answered as JSON or Kubernetes protobuf only")
	}
	x.r.Header["Accept"] = []string{accept}
	delete(x.r.Header, "Accept-Encoding")
	x.lock = s.lock
	return nil
}

// answerLock sends what the apiserver answered about the lock.
func (x *exchange) answerLock(resp *http.Response) {
	contentType := resp.Header.Get("Content-Type")
	if x.info.Verb == "watch" && resp.StatusCode == http.StatusOK {
		events, err := x.lock.Events(contentType, resp.Body)
		if err != nil {
			x.badAnswer("the lock", err)
			return
		}
		delete(resp.Header, "Content-Length")
		resp.ContentLength = -1
		resp.Body = filtered{events, resp.Body}
		x.harmWatch(resp)
		x.sendHead(resp)
		x.copyStream(resp.Body)
		return
	}
	body, err := x.readAll(resp.Body, maxLockAnswer)
	if refused, ok := errors.AsType[*apierrors.StatusError](err); ok {
		x.badAnswer("the lock", refused)
		return
	}
	if err != nil {
		x.failed(err)
		return
	}
	if resp.StatusCode/100 == 2 {
		switch x.info.Verb {
		case "create", "update", "patch":
			x.pod.holds(x.info.Resource, lock.Holder(contentType, body))
		case "delete", "deletecollection":
			x.pod.holds(x.info.Resource, lock.Held{})
		}
	}
	edited, err := x.lock.Answer(contentType, body)
	if err != nil {
		x.badAnswer("the lock", err)
		return
	}
	if x.r.Method != http.MethodHead {
		setLength(resp.Header, len(edited))
	}
	x.sendHead(resp)
	x.write(edited)
}

// maxLockAnswer bounds the answer to a lock request, in bytes.
const maxLockAnswer = 4 * lock.MaxObject
