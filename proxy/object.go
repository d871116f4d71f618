package proxy

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"maps"
	"net/http"
	"net/url"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilnet "k8s.io/apimachinery/pkg/util/net"

	"github.com/ctrlmesh/ctrlmesh/proxy/filter"
	"github.com/ctrlmesh/ctrlmesh/proxy/isolation"
	"github.com/ctrlmesh/ctrlmesh/proxy/lock"
	"github.com/ctrlmesh/ctrlmesh/proxy/status"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/upstream"
)

const (
	typeJSON     = "application/json"
	typeProtobuf = "application/vnd.kubernetes.protobuf"
	// partial requests only the metadata of an object.
	partial = typeJSON + ";as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
	// maxRead bounds an object that is read for its uid, in bytes.
	maxRead = 4 * lock.MaxObject
)

// object decides by the uid of the object that a request is for. For a get, the response
// has it. For other requests, the proxy first gets the object with the caller's own
// permissions; a missing object belongs to no shard.
//
// The name may be given to another object between the look-up and the write. So the body is
// read before the look-up, and the write names the uid (pin).
func (s *fenceStage) object(x *state) *outcome {
	switch {
	case len(x.req.info.Parts) < 2: // deletecollection, or a binding, whose body names the pod
		return s.encounter(x, "not each of these objects", "")
	case x.req.method == http.MethodGet && len(x.req.info.Parts) == 2 && !s.Observe:
		return s.get(x)
	}
	var body []byte
	if x.plan.key.Writes() && !x.plan.key.Connects() && !s.Observe {
		var refused *apierrors.StatusError
		if body, refused = x.readBody(lock.MaxObject); refused != nil {
			return refusal(refused)
		}
		x.out.replace(body)
	}
	uid, refused := s.lookUp(x)
	switch {
	case refused != nil && refused.ErrStatus.Code == http.StatusNotFound:
		return nil
	case refused != nil:
		return s.undecided(refused)
	case !s.Owns(uid):
		return s.encounter(x, "object "+x.req.info.Name, uid)
	case s.Observe:
		return nil
	}
	return s.pin(x, body, uid)
}

// pin adds the uid to a write, so that the apiserver refuses it if the name is another
// object's by then. Subresources other than the status have no place for it.
func (s *fenceStage) pin(x *state, body []byte, uid string) *outcome {
	verb, subresource := x.req.info.Verb, x.req.info.Subresource
	switch {
	case verb == "delete" && subresource == "":
		if len(bytes.TrimSpace(body)) == 0 {
			body = []byte(`{"kind":"DeleteOptions","apiVersion":"v1"}`)
			x.out.set("Content-Type", typeJSON)
		}
	case (verb == "update" || verb == "patch") && (subresource == "" || subresource == "status"):
	default:
		return nil
	}
	named, pinned := isolation.Pin(verb, cmp.Or(x.out.header.get("Content-Type"), typeJSON), body, uid)
	switch {
	case named != "" && !s.Owns(named):
		return s.encounter(x, "object "+x.req.info.Name, named)
	case pinned != nil:
		x.out.replace(pinned)
	}
	return nil
}

// get requests a response that has the object's uid.
func (s *fenceStage) get(x *state) *outcome {
	accept, ok := lock.Accept(x.out.header.get("Accept"))
	if !ok {
		return refusal(status.NotAcceptable("the uid of %s must be read: ask for JSON or Kubernetes protobuf", x.req.info.Resource))
	}
	var err error
	if x.out.query, err = withMetadata(x.out.query); err != nil {
		return refusal(status.BadRequest("%v", err))
	}
	x.out.set("Accept", accept)
	x.out.drop("Accept-Encoding")
	x.responses.only(s) // no other stage may read an object of another shard
	return nil
}

// respond passes the object on if the shard owns it.
func (s *fenceStage) respond(x *state, resp *upstream.Response) *outcome {
	if resp.Status != http.StatusOK {
		return nil
	}
	contentType := resp.Get("Content-Type")
	body, err := x.readAll(resp.Body, maxRead)
	if refused, ok := errors.AsType[*apierrors.StatusError](err); ok {
		return x.plan.badResponse(x.req.info.Resource, refused)
	}
	if err != nil {
		return failure(err)
	}
	_, _, uid, err := filter.KeyOf(contentType, body)
	if err != nil {
		return x.plan.badResponse(x.req.info.Resource, err)
	}
	if !s.Owns(uid) {
		if end := s.encounter(x, "object "+x.req.info.Name, uid); end != nil {
			return end
		}
	}
	setLength(resp.Header, len(body))
	x.whole = body
	return nil
}

// lookUp gets the uid of the object that a request is for.
func (s *fenceStage) lookUp(x *state) (uid string, refused *apierrors.StatusError) {
	header := maps.Clone(x.out.header)
	header["Accept"] = []string{partial}
	for _, of := range []string{"Accept-Encoding", "Content-Type", auditHeader} { // an audit id is one request's
		delete(header, of)
	}
	resp, err := s.policy.env.get(x.req.ctx, &upstream.Request{
		Method: http.MethodGet, Target: x.req.objectPath(x.out.path), Host: x.req.host, Header: header,
	})
	if err != nil {
		return "", s.noResponse(x, err)
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := x.readAll(resp.Body, maxRead)
	if err != nil {
		return "", s.noResponse(x, err)
	}
	if resp.Status != http.StatusOK {
		failure := metav1.Status{Code: int32(resp.Status), Status: metav1.StatusFailure}
		_ = json.Unmarshal(body, &failure) // else the code must suffice
		failure.Code = int32(resp.Status)
		return "", &apierrors.StatusError{ErrStatus: failure}
	}
	if _, _, uid, err = filter.KeyOf(resp.Get("Content-Type"), body); err != nil {
		return "", status.New(http.StatusBadGateway, "BadGateway", 0, "the owner of the object cannot be read: %v", err)
	}
	return uid, nil
}

// noResponse counts that the apiserver did not answer, and returns the refusal instead.
func (s *fenceStage) noResponse(x *state, err error) *apierrors.StatusError {
	if refused, ok := errors.AsType[*apierrors.StatusError](err); ok {
		return refused
	}
	x.plan.meters.UpstreamErrors.Inc()
	return s.policy.env.noResponse(err)
}

// objectPath returns an escaped path up to the object's name.
func (r *request) objectPath(escaped string) string {
	segments := strings.Split(strings.TrimPrefix(escaped, "/"), "/")
	head := len(strings.Split(strings.Trim(r.path, "/"), "/")) - len(r.info.Parts) + 2
	segments = segments[:min(head, len(segments))]
	if r.info.Subresource == "proxy" { // the name may have a scheme and a port around it
		if _, name, _, ok := utilnet.SplitSchemeNamePort(r.info.Name); ok {
			segments[len(segments)-1] = url.PathEscape(name)
		}
	}
	return "/" + strings.Join(segments, "/")
}
