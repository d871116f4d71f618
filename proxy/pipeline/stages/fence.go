package stages

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilnet "k8s.io/apimachinery/pkg/util/net"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/filter"
	"github.com/ctrlmesh/ctrlmesh/proxy/isolation"
	"github.com/ctrlmesh/ctrlmesh/proxy/lock"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
	"github.com/ctrlmesh/ctrlmesh/proxy/pipeline"
	"github.com/ctrlmesh/ctrlmesh/proxy/status"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/upstream"
)

// fenceStage refuses, or counts, requests for objects that another shard owns. It refuses those
// for objects outside the namespaces of limits.
type fenceStage struct {
	*isolation.Fence
	policy  *Policy
	refused prometheus.Counter
	dry     bool // nothing is refused, as in a dry run
	// Of Observe, for objects of other shards, and where the owner is not known.
	withheld, unknown withheld
}

// newFenceStage returns nil for requests that need no check: lists, reads that all shards
// may send, and what isolation Off permits. In standby, all writes are refused.
func newFenceStage(p *Policy, key match.Kind) pipeline.Stage {
	f := p.Division.Fence(key)
	if f == nil || p.Division.Waiting(key) != nil {
		return nil
	}
	s := &fenceStage{Fence: f, policy: p}
	if f.Observe && !f.Passes {
		s.withheld, s.unknown = p.withheldAction(key.Verb, observedForeign), p.withheldAction(key.Verb, observedUnknown)
	}
	if f.Limit != nil || !f.Observe {
		s.refused = p.Tally.Metrics.Action(p.env.Metrics.Foreign, key.Verb, "refused")
	}
	return s
}

func (s *fenceStage) Apply(x *pipeline.State) *pipeline.Outcome {
	switch {
	case x.Exempt:
		return nil
	case s.By == isolation.ByUID:
		return s.object(x)
	case s.InBody:
		return s.create(x)
	case s.By == isolation.ByName && x.Req.Info.Name == "": // deletecollection
		return s.encounter(x, "not each of these objects", "")
	case s.By == isolation.ByName:
		return s.named(x, x.Req.Info.Name)
	}
	return s.in(x, x.Req.Info.Namespace)
}

// named decides on a request for an object by its own name.
func (s *fenceStage) named(x *pipeline.State, name string) *pipeline.Outcome {
	if s.Foreign(name) {
		return s.encounter(x, "object "+pipeline.Bounded(name), name)
	}
	return nil
}

// in decides on a request for an object in a namespace, or for the namespace itself.
func (s *fenceStage) in(x *pipeline.State, namespace string) *pipeline.Outcome {
	switch {
	case s.Outside(namespace):
		return s.outside(x, "namespace "+namespace)
	case !s.Passes && s.Foreign(namespace):
		return s.encounter(x, "namespace "+namespace, namespace)
	}
	return nil
}

// outside handles a request for an object that no shard reads or writes.
func (s *fenceStage) outside(x *pipeline.State, what string) *pipeline.Outcome {
	if s.dry {
		s.withheld.note(x)
		return nil
	}
	s.refused.Inc()
	return s.policy.outside(x.Req.Info, what)
}

// encounter handles a request for an object that another shard owns; the key is empty if
// it is not known.
func (s *fenceStage) encounter(x *pipeline.State, what, key string) *pipeline.Outcome {
	if s.Observe {
		s.withheld.note(x)
		return nil
	}
	s.refused.Inc()
	return s.policy.forbidden(x.Req.Info, what, s.policy.Division.Owner(key))
}

// lenient reports whether nothing is refused.
func (s *fenceStage) lenient() bool { return s.dry || s.Observe && s.Limit == nil }

// undecided handles a request whose object has an unknown key.
func (s *fenceStage) undecided(x *pipeline.State, refused *apierrors.StatusError) *pipeline.Outcome {
	if s.lenient() {
		s.unknown.note(x)
		return nil
	}
	return pipeline.RefusalFor(meshv1.RefusedUnknown, refused)
}

// create decides on the creation of an object by the name in the body.
func (s *fenceStage) create(x *pipeline.State) *pipeline.Outcome {
	if s.lenient() && x.Out.Header.Get("Content-Encoding") != "" {
		return s.undecided(x, nil)
	}
	name, refused, err := nameInBody(x)
	switch {
	case refused != nil:
		return pipeline.Refusal(refused)
	case errors.Is(err, filter.ErrType):
		return s.undecided(x, status.UnsupportedMediaType("the name of the object must be read: %v", err))
	case err != nil:
		return s.undecided(x, status.BadRequest("the name of the object must be read: %v", err))
	case name == "" && s.Limit != nil: // the apiserver generates it
		return s.outside(x, "an object whose name is to be generated")
	case name == "":
		return s.encounter(x, "an object whose name is to be generated", "")
	case s.By == isolation.ByName:
		return s.named(x, name)
	}
	return s.in(x, name)
}

// nameInBody returns the name of the object that a request creates. The error says why it
// cannot be read.
func nameInBody(x *pipeline.State) (name string, refused *apierrors.StatusError, err error) {
	raw, refused := x.ReadBody(lock.MaxObject)
	if refused != nil {
		return "", refused, nil
	}
	x.Out.Replace(raw)
	_, name, _, err = filter.KeyOf(cmp.Or(x.Out.Header.Get("Content-Type"), typeJSON), raw)
	return name, nil, err
}

// standbyRetry is the Retry-After of what a member in standby is refused, in seconds.
// client-go repeats the request itself, so that the first one after the standby passes.
const standbyRetry = 1

// standbyStage refuses the writes of a member that owns nothing yet.
type standbyStage struct {
	*isolation.Waiting
	policy *Policy
}

// newStandbyStage returns nil for requests that a member in standby may send.
func newStandbyStage(p *Policy, key match.Kind) pipeline.Stage {
	if w := p.Division.Waiting(key); w != nil {
		return standbyStage{w, p}
	}
	return nil
}

func (s standbyStage) Apply(x *pipeline.State) *pipeline.Outcome {
	if !s.Refuses(x.Req.Info.Namespace) {
		return nil
	}
	return s.policy.inStandby()
}

// inStandby refuses a write until the pod is given keys.
func (p *Policy) inStandby() *pipeline.Outcome {
	return pipeline.RefusalFor(meshv1.RefusedStandby, status.Unavailable(standbyRetry, "pod %s is in standby and may not write yet: %s", p.env.ID, p.standbyReason()))
}

// standbyReason returns why the pod is in standby.
func (p *Policy) standbyReason() string {
	if why := p.Message.GetSharding().GetStandbyReason(); why != "" {
		return why
	}
	return fmt.Sprintf("ShardingConfig %s/%s: its shard owns nothing yet", p.env.Info.Namespace, p.Shard)
}

// forbidden refuses a request for an object that another shard owns, and says why.
func (p *Policy) forbidden(info *pipeline.RequestInfo, what, why string) *pipeline.Outcome {
	resource := info.Resource
	if info.Subresource != "" {
		resource += "/" + info.Subresource
	}
	return refuseForeign(info, "%s %s: %s does not belong to this pod's shard, ShardingConfig %s/%s: %s",
		info.Verb, resource, what, p.env.Info.Namespace, p.Shard, why)
}

// outside refuses a request for an object that no shard reads or writes.
func (p *Policy) outside(info *pipeline.RequestInfo, what string) *pipeline.Outcome {
	return refuseForeign(info, "%s %s: %s is outside the limits of this pod's shard, ShardingConfig %s/%s: see namespaces in spec.root.resourceSelector and spec.limits",
		info.Verb, info.Resource, what, p.env.Info.Namespace, p.Shard)
}

func refuseForeign(info *pipeline.RequestInfo, format string, args ...any) *pipeline.Outcome {
	refused := status.New(http.StatusForbidden, metav1.StatusReasonForbidden, 0, format, args...)
	refused.ErrStatus.Details = &metav1.StatusDetails{Name: info.Name, Group: info.APIGroup, Kind: info.Resource}
	return pipeline.RefusalFor(meshv1.RefusedForeign, refused)
}

const (
	typeJSON = "application/json"
	// partial requests only the metadata of an object.
	partial = typeJSON + ";as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
)

// object decides by the uid of the object that a request is for. For a get, the response
// has it. For other requests, the proxy first gets the object with the caller's own
// permissions; a missing object belongs to no shard.
//
// The name may be given to another object between the look-up and the write. So the body is
// read before the look-up, and the write names the uid (pin).
func (s *fenceStage) object(x *pipeline.State) *pipeline.Outcome {
	switch {
	case len(x.Req.Info.Parts) < 2: // deletecollection, or a binding, whose body names the pod
		return s.encounter(x, "not each of these objects", "")
	case x.Req.Method == http.MethodGet && len(x.Req.Info.Parts) == 2 && !s.Observe:
		return s.get(x)
	}
	var body []byte
	if x.Plan.Key.Writes() && !x.Plan.Key.Connects() && !s.Observe {
		var refused *apierrors.StatusError
		if body, refused = x.ReadBody(lock.MaxObject); refused != nil {
			return pipeline.Refusal(refused)
		}
		x.Out.Replace(body)
	}
	uid, refused := s.lookUp(x)
	switch {
	case refused != nil && refused.ErrStatus.Code == http.StatusNotFound:
		return nil
	case refused != nil:
		return s.undecided(x, refused)
	case !s.Owns(uid):
		return s.encounter(x, "object "+x.Req.Info.Name, uid)
	case s.Observe:
		return nil
	}
	if x.Plan.Key.Writes() {
		if end := s.policy.catchingUp(x, func(before *isolation.Division) bool { return s.policy.Division.GainsKey(before, x.Plan.Key, uid) }); end != nil {
			return end
		}
	}
	return s.pin(x, body, uid)
}

// pin adds the uid to a write, so that the apiserver refuses it if the name is another
// object's by then. Subresources other than the status have no place for it.
func (s *fenceStage) pin(x *pipeline.State, body []byte, uid string) *pipeline.Outcome {
	verb, subresource := x.Req.Info.Verb, x.Req.Info.Subresource
	switch {
	case verb == "delete" && subresource == "":
		if len(bytes.TrimSpace(body)) == 0 {
			body = []byte(`{"kind":"DeleteOptions","apiVersion":"v1"}`)
			x.Out.Set("Content-Type", typeJSON)
		}
	case (verb == "update" || verb == "patch") && (subresource == "" || subresource == "status"):
	default:
		return nil
	}
	named, pinned, err := isolation.Pin(verb, cmp.Or(x.Out.Header.Get("Content-Type"), typeJSON), body, uid)
	switch {
	case err != nil:
		return pipeline.Refusal(status.BadRequest("naming the uid of %s: %v", x.Req.Info.Resource, err))
	case named != "" && !s.Owns(named):
		return s.encounter(x, "object "+x.Req.Info.Name, named)
	case pinned != nil:
		x.Out.Replace(pinned)
	}
	return nil
}

// get requests a response that has the object's uid.
func (s *fenceStage) get(x *pipeline.State) *pipeline.Outcome {
	accept, ok := lock.Accept(x.Out.Header.Get("Accept"))
	if !ok {
		return pipeline.Refusal(status.NotAcceptable("the uid of %s must be read: ask for JSON or Kubernetes protobuf", x.Req.Info.Resource))
	}
	var err error
	if x.Out.Query, err = withMetadata(x.Out.Query); err != nil {
		return pipeline.Refusal(status.BadRequest("%v", err))
	}
	x.Out.Set("Accept", accept)
	x.Out.Drop("Accept-Encoding")
	x.Responses.Only(s) // no other stage may read an object of another shard
	return nil
}

// Respond passes the object on if the shard owns it.
func (s *fenceStage) Respond(x *pipeline.State, resp *upstream.Response) *pipeline.Outcome {
	if resp.Status != http.StatusOK {
		return nil
	}
	contentType := resp.Get("Content-Type")
	body, end := readWhole(x, resp, x.Req.Info.Resource)
	if end != nil {
		return end
	}
	_, _, uid, err := filter.KeyOf(contentType, body)
	if err != nil {
		return x.Plan.BadResponse(x.Req.Info.Resource, err)
	}
	if !s.Owns(uid) {
		if end := s.encounter(x, "object "+x.Req.Info.Name, uid); end != nil {
			return end
		}
	}
	resp.SetLength(len(body))
	x.Whole = body
	return nil
}

// read sends a GET of the proxy's own, with the permissions of the caller of a request.
func (p *Policy) read(ctx context.Context, x *pipeline.State, target, accept string) (upstream.Response, error) {
	return p.env.Get(ctx, p.reading(x, target, accept))
}

// reading returns a GET with the permissions of the caller of a request.
func (p *Policy) reading(x *pipeline.State, target, accept string) *upstream.Request {
	header := slices.Clone(x.Out.Header)
	header.Set("Accept", accept)
	header.Drop("Accept-Encoding", "Content-Type", pipeline.AuditHeader) // an audit id is one request's
	if agent, ok := newUserAgentStage(p, x.Plan.Key).(*userAgentStage); ok {
		header.Set("User-Agent", agent.of(x.Req.Header)) // which stages have not edited
	}
	return &upstream.Request{Method: http.MethodGet, Target: target, Host: x.Req.Host, Header: header}
}

// lookUp gets the uid of the object that a request is for.
func (s *fenceStage) lookUp(x *pipeline.State) (uid string, refused *apierrors.StatusError) {
	resp, err := s.policy.read(x.Req.Ctx, x, objectPath(&x.Req, x.Out.Path), partial)
	if err != nil {
		return "", s.noResponse(x, err)
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := x.Memory.ReadAll(resp.Body, maxWhole)
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
func (s *fenceStage) noResponse(x *pipeline.State, err error) *apierrors.StatusError {
	if refused, ok := errors.AsType[*apierrors.StatusError](err); ok {
		return refused
	}
	x.Plan.Meters.UpstreamErrors.Inc()
	return s.policy.env.NoResponse(err)
}

// objectPath returns an escaped path up to the object's name.
func objectPath(r *pipeline.Request, escaped string) string {
	segments := strings.Split(strings.TrimPrefix(escaped, "/"), "/")
	head := len(strings.Split(strings.Trim(r.Path, "/"), "/")) - len(r.Info.Parts) + 2
	segments = segments[:min(head, len(segments))]
	if r.Info.Subresource == "proxy" { // the name may have a scheme and a port around it
		if _, name, _, ok := utilnet.SplitSchemeNamePort(r.Info.Name); ok {
			segments[len(segments)-1] = url.PathEscape(name)
		}
	}
	return "/" + strings.Join(segments, "/")
}
