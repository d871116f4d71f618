package proxy

import (
	"errors"
	"net/http"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/lock"
	"github.com/ctrlmesh/ctrlmesh/proxy/narrow"
	"github.com/ctrlmesh/ctrlmesh/proxy/status"
)

// scopeStage narrows a list, watch or deletecollection to the shard's objects.
type scopeStage struct {
	selector *narrow.Selector
	// shared: it also holds for the lists of shared objects, because it says nothing
	// about shards.
	shared bool
}

// scopeStage returns nil where no selector narrows.
func (p *policy) scopeStage(key planKey) *scopeStage {
	switch key.verb {
	case "list", "watch", "deletecollection":
		if selector := p.limits.For(key.group, key.resource); selector != nil {
			return &scopeStage{selector, p.standby || p.method != meshv1.Method_METHOD_LABELS}
		}
	}
	return nil
}

func (s *scopeStage) apply(x *exchange) *outcome {
	if x.exempt && (!s.shared || x.req.info.Name != "") {
		return nil
	}
	narrowed, err := s.selector.Narrow(x.out.query)
	if err != nil {
		return refusal(status.BadRequest("%v", err))
	}
	x.out.query = narrowed
	return nil
}

// answerLock sends what the apiserver answered about the lock.
func (x *exchange) answerLock(resp *http.Response) {
	contentType := resp.Header.Get("Content-Type")
	if x.req.info.Verb == "watch" && resp.StatusCode == http.StatusOK {
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
		switch x.req.info.Verb {
		case "create", "update", "patch":
			x.wroteLock(lock.Holder(contentType, body))
		case "delete", "deletecollection":
			x.wroteLock(lock.Held{})
		}
	}
	edited, err := x.lock.Answer(contentType, body)
	if err != nil {
		x.badAnswer("the lock", err)
		return
	}
	if x.req.method != http.MethodHead {
		setLength(resp.Header, len(edited))
	}
	x.sendHead(resp)
	x.write(edited)
}

// wroteLock notes what the request wrote into its lock.
func (x *exchange) wroteLock(h lock.Held) {
	x.pod.records.write(x.lock, x.policy.locks, x.req.info.Resource, h)
}

// maxLockAnswer bounds the answer to a lock request, in bytes.
const maxLockAnswer = 4 * lock.MaxObject
