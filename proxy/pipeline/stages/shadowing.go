package stages

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"mime"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/filter"
	"github.com/ctrlmesh/ctrlmesh/proxy/isolation"
	"github.com/ctrlmesh/ctrlmesh/proxy/lock"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
	"github.com/ctrlmesh/ctrlmesh/proxy/pipeline"
	"github.com/ctrlmesh/ctrlmesh/proxy/query"
	"github.com/ctrlmesh/ctrlmesh/proxy/shadow"
	"github.com/ctrlmesh/ctrlmesh/proxy/status"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/upstream"
)

// maxCompared bounds an object that is compared, in bytes of JSON.
const maxCompared = 1 << 20

// tried are the subresources of which Kubernetes documents dry runs. Those of other names belong to
// aggregated APIs, which may not know dry runs, or open connections.
var tried = []string{"", "status", "scale", "binding", "eviction", "approval", "finalize", "token", "ephemeralcontainers", "resize"}

// shadowStage sends the writes of a shadow as dry runs, except for those of its locks, and has them
// compared with what others write. It refuses what cannot be a dry run.
type shadowStage struct {
	policy   *Policy
	key      match.Kind
	window   time.Duration
	ignored  []string
	try      bool // a dry run is possible
	compared bool // the object can be read
}

// newShadowStage returns nil for requests that write nothing, and for pods that are no shadow.
func newShadowStage(p *Policy, key match.Kind) pipeline.Stage {
	spec := p.Message.GetSharding().GetShadow()
	if spec == nil || isResource(key) && !key.Writes() && !key.Connects() || isolation.Reviews(key) {
		return nil
	}
	if !isResource(key) && slices.Contains([]string{"get", "head", "options"}, key.Verb) {
		return nil
	}
	s := &shadowStage{
		policy: p, key: key, window: time.Duration(spec.GetWindowNs()), ignored: spec.GetIgnoredFields(),
		try:      isResource(key) && !key.Connects() && slices.Contains(tried, key.Subresource),
		compared: key.Verb != "deletecollection" && (key.Subresource == "" || key.Subresource == "status"),
	}
	for _, r := range []shadow.Result{shadow.Agreed, shadow.Differed, shadow.Refused, shadow.Uncompared} {
		p.Tally.Metrics.Action(p.env.Metrics.Shadow, key.Verb, string(r)) // the series exist from then on
	}
	return s
}

func (s *shadowStage) Apply(x *pipeline.State) *pipeline.Outcome {
	switch {
	case x.Lock.Named != nil: // the shadow has a leader of its own
		return nil
	case !s.try:
		return s.refuse(x)
	}
	edited, err := query.Set(x.Out.Query, "dryRun", metav1.DryRunAll)
	if err != nil {
		return pipeline.Refusal(status.BadRequest("%v", err))
	}
	x.Out.Query = edited
	if s.key.Verb == "delete" || s.key.Verb == "deletecollection" {
		if end := dryDeletion(x); end != nil {
			return end
		}
	}
	if s.key.Resource == "events" { // each has a name of its own
		return nil
	}
	one := &shadowWrite{shadowStage: s, compare: s.compared}
	if s.key.Verb == "create" {
		if end := one.readBody(x); end != nil {
			return end
		}
	}
	if one.compare && s.key.Verb != "delete" {
		if one.compare = acceptsJSON(x.Out.Header.Get("Accept")); one.compare {
			x.Out.Set("Accept", typeJSON)
			x.Out.Drop("Accept-Encoding")
		}
	}
	x.Responses.Last(one)
	return nil
}

func (s *shadowStage) refuse(x *pipeline.State) *pipeline.Outcome {
	what := x.Req.Info.Path
	if x.Req.Info.IsResourceRequest {
		what = strings.TrimSuffix(x.Req.Info.Resource+"/"+x.Req.Info.Subresource, "/")
	}
	return pipeline.RefusalFor(meshv1.RefusedShadow, status.New(http.StatusForbidden, metav1.StatusReasonForbidden, 0,
		"%s %s: the pod is a shadow, see spec.shadow of ShardingConfig %s/%s, and this cannot be tried as a dry run",
		x.Req.Info.Verb, pipeline.Bounded(what), s.policy.env.Info.Namespace, s.policy.Shard))
}

// dryDeletion makes a deletion with a body a dry run.
func dryDeletion(x *pipeline.State) *pipeline.Outcome {
	raw, refused := x.ReadBody(lock.MaxObject)
	if refused != nil {
		return pipeline.Refusal(refused)
	}
	if edited, ok := x.Out.Body.(*bytes.Reader); ok { // by another stage
		raw, _ = io.ReadAll(edited) // from memory
	}
	dry, err := shadow.DryDeletion(x.Out.Header.Get("Content-Type"), raw)
	if err != nil {
		return pipeline.Refusal(status.UnsupportedMediaType("a shadow's deletions are dry runs: %v", err))
	}
	x.Out.Replace(dry)
	return nil
}

// acceptsJSON reports whether a client takes a whole object as JSON.
func acceptsJSON(accept string) bool {
	if strings.TrimSpace(accept) == "" {
		return true
	}
	return slices.ContainsFunc(strings.Split(accept, ","), func(part string) bool {
		media, parameters, err := mime.ParseMediaType(part)
		_, transformed := parameters["as"]
		return err == nil && !transformed && slices.Contains([]string{typeJSON, "application/*", "*/*"}, media)
	})
}

// shadowWrite is one write of a shadow.
type shadowWrite struct {
	*shadowStage
	compare bool
	body    *shadow.Object // of a creation; nil: not JSON
}

// readBody reads what a creation asks for. What has no name yet cannot be compared.
func (s *shadowWrite) readBody(x *pipeline.State) *pipeline.Outcome {
	if x.Out.Header.Get("Content-Encoding") != "" {
		s.compare = false
		return nil
	}
	raw, refused := x.ReadBody(lock.MaxObject)
	if refused != nil {
		return pipeline.Refusal(refused)
	}
	x.Out.Replace(raw)
	contentType := x.Out.Header.Get("Content-Type")
	_, name, _, err := filter.KeyOf(contentType, raw)
	s.compare = s.compare && err == nil && name != "" && len(raw) <= maxCompared
	if s.compare && (contentType == "" || strings.HasPrefix(contentType, typeJSON)) {
		s.body, err = shadow.Parse(raw, s.ignored)
		s.compare = err == nil
	}
	return nil
}

// Respond has a write compared that the apiserver has accepted.
func (s *shadowWrite) Respond(x *pipeline.State, resp *upstream.Response) *pipeline.Outcome {
	switch code := resp.Status; {
	case code == http.StatusConflict, code == http.StatusNotFound, code == http.StatusGone, code == http.StatusTooManyRequests, code >= 500:
		s.note(shadow.Uncompared) // the operator tries again
	case code >= 400:
		s.note(shadow.Refused)
	case !s.compare:
		s.note(shadow.Uncompared)
	case s.key.Verb == "delete":
		s.await(x, nil, objectPath(&x.Req, x.Out.Path))
	default:
		return s.respond(x, resp)
	}
	return nil
}

// respond reads the object as it would be, and passes it on.
func (s *shadowWrite) respond(x *pipeline.State, resp *upstream.Response) *pipeline.Outcome {
	body, end := readWhole(x, resp, x.Req.Info.Resource)
	if end != nil {
		return end
	}
	resp.SetLength(len(body))
	x.Whole = body
	after, err := s.parse(body)
	if err != nil {
		s.note(shadow.Uncompared)
		return nil
	}
	path := x.Out.Path + "/" + url.PathEscape(after.Name)
	if s.key.Verb != "create" {
		path = objectPath(&x.Req, x.Out.Path)
	}
	s.await(x, after, path)
	return nil
}

func (s *shadowStage) parse(body []byte) (*shadow.Object, error) {
	if len(body) > maxCompared {
		return nil, fmt.Errorf("it is larger than %d bytes", maxCompared)
	}
	return shadow.Parse(body, s.ignored)
}

// note counts a write that is not compared.
func (s *shadowWrite) note(r shadow.Result) {
	s.count(r)
	s.policy.env.Observations.Shadow.Note(r)
}

func (s *shadowStage) count(r shadow.Result) {
	s.policy.Tally.Metrics.Action(s.policy.env.Metrics.Shadow, s.key.Verb, string(r)).Inc()
}

// await has a write compared with the object at a path. The caller's credentials are kept in
// memory until the window is over, to read it.
func (s *shadowWrite) await(x *pipeline.State, after *shadow.Object, path string) {
	stage, get := s.shadowStage, s.policy.reading(x, path, typeJSON)
	resource := s.key.Resource
	if s.key.Subresource != "" {
		resource += "/" + s.key.Subresource
	}
	env := s.policy.env
	env.Observations.Shadow.Compare(env.Draining, &shadow.Write{
		Verb: s.key.Verb, Group: s.key.Group, Resource: resource, Path: path, Body: s.body, After: after, Window: s.window, Count: stage.count,
		Read: func(ctx context.Context) (*shadow.Object, error) {
			one := *get
			one.Header = slices.Clone(get.Header)
			resp, err := env.Get(ctx, &one)
			if err != nil {
				return nil, err
			}
			defer func() { _ = resp.Body.Close() }()
			body, err := io.ReadAll(io.LimitReader(resp.Body, maxCompared+1))
			switch {
			case err != nil:
				return nil, fmt.Errorf("reading an object: %w", err)
			case resp.Status == http.StatusNotFound:
				return nil, nil
			case resp.Status != http.StatusOK:
				return nil, fmt.Errorf("reading an object: HTTP status %d", resp.Status)
			}
			return stage.parse(body)
		},
	})
}
