package stages

import (
	"bufio"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"net/http"

	"github.com/prometheus/client_golang/prometheus"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/ctrlmesh/ctrlmesh/proxy/filter"
	"github.com/ctrlmesh/ctrlmesh/proxy/isolation"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
	"github.com/ctrlmesh/ctrlmesh/proxy/metrics"
	"github.com/ctrlmesh/ctrlmesh/proxy/pipeline"
	"github.com/ctrlmesh/ctrlmesh/proxy/query"
	"github.com/ctrlmesh/ctrlmesh/proxy/status"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/upstream"
)

// scopeStage narrows a list, watch or deletecollection by a label selector.
type scopeStage struct {
	selector *isolation.Selector
	// shared: it also applies to the lists of shared objects.
	shared bool
}

// newScopeStage returns nil where no selector narrows.
func newScopeStage(p *Policy, key match.Kind) pipeline.Stage {
	switch key.Verb {
	case "list", "watch", "deletecollection":
	default:
		return nil
	}
	selector := p.Division.Selector(key.GroupResource())
	if selector == nil {
		return nil
	}
	if key.Verb != "deletecollection" && p.Division.Narrowing(key.GroupResource()) == nil {
		p.env.Observations.Methods.Note(key.GroupResource(), isolation.ByLabels)
	}
	return &scopeStage{selector, p.Division.SelectsShared()}
}

func (s *scopeStage) Apply(x *pipeline.State) *pipeline.Outcome {
	if x.Exempt && (!s.shared || x.Req.Info.Name != "") {
		return nil
	}
	narrowed, err := s.selector.Narrow(x.Out.Query)
	if err != nil {
		return pipeline.Refusal(status.BadRequest("%v", err))
	}
	x.Out.Query = narrowed
	return nil
}

// sweepStage makes a deletecollection in a namespace of another shard delete nothing: a
// list finds nothing there either.
type sweepStage struct{ isolation.Border }

// newSweepStage returns nil where a deletecollection is in no namespace of another shard.
func newSweepStage(p *Policy, key match.Kind) pipeline.Stage {
	if key.Verb != "deletecollection" {
		return nil
	}
	if b, ok := p.Division.Sweep(key); ok {
		return sweepStage{b}
	}
	return nil
}

func (s sweepStage) Apply(x *pipeline.State) *pipeline.Outcome {
	if x.Exempt || !s.Foreign(x.Req.Info.Namespace) {
		return nil
	}
	return (&scopeStage{selector: isolation.Nothing}).Apply(x)
}

// exemptStage exempts requests for objects that every shard reads, or writes.
type exemptStage struct{ *isolation.Exemption }

// newExemptStage returns nil where nothing is exempt.
func newExemptStage(p *Policy, key match.Kind) pipeline.Stage {
	if e := p.Division.Exemption(key); e != nil {
		return exemptStage{e}
	}
	return nil
}

func (s exemptStage) Apply(x *pipeline.State) *pipeline.Outcome {
	if x.Exempt {
		return nil
	}
	covered, end := covers(s.Exemption, x)
	x.Exempt = covered
	return end
}

// covers reports whether a request is for an object that is exempt; e may be nil.
func covers(e *isolation.Exemption, x *pipeline.State) (bool, *pipeline.Outcome) {
	if e == nil {
		return false, nil
	}
	namespace, name := x.Req.Info.Namespace, x.Req.Info.Name
	if e.NeedsName(namespace, name) {
		inBody, refused, err := nameInBody(x)
		if refused != nil {
			return false, pipeline.Refusal(refused)
		}
		if err == nil {
			name = inBody
		}
	}
	return e.Covers(namespace, name), nil
}

const (
	shardSelector = "shardSelector"
	includeObject = "includeObject"
)

// narrowStage narrows a list or watch of a divided resource to the shard's keys. The
// response is filtered, so nothing depends on what the apiserver makes of the query, which
// only saves work. So a shardSelector is always sent where there is one: an apiserver that
// does not know it ignores it, and another behind the same address may not.
type narrowStage struct {
	*isolation.Narrowing
	resource      schema.GroupResource
	watch         bool
	weight        int64 // that filtering takes at least, in bytes
	kept, dropped prometheus.Counter
	methods       *isolation.Methods // nil: the method is of no interest
}

// newNarrowStage returns the stage for a list or watch, nil where scopes narrow nothing.
func newNarrowStage(p *Policy, key match.Kind) pipeline.Stage {
	if key.Verb != "list" && key.Verb != "watch" {
		return nil
	}
	res, watch := key.GroupResource(), key.Verb == "watch"
	n := p.Division.Narrowing(res)
	if n == nil {
		return nil
	}
	count := func(result string) prometheus.Counter {
		return p.Tally.Metrics.Counter(p.env.Metrics.Filtered, p.Tally.Metrics.Resource(res.Resource), result)
	}
	s := &narrowStage{Narrowing: n, resource: res, watch: watch, weight: filter.ListBuffer, kept: count("kept"), dropped: count("dropped"), methods: &p.env.Observations.Methods}
	if watch {
		s.weight = filter.WatchBuffer
	}
	return s
}

// emptyStage returns the stage for a list or watch that finds nothing.
func emptyStage(res schema.GroupResource, watch bool) *narrowStage {
	s := &narrowStage{Narrowing: isolation.NoObjects, resource: res, watch: watch, weight: filter.ListBuffer, kept: metrics.Discard, dropped: metrics.Discard}
	if watch {
		s.weight = filter.WatchBuffer
	}
	return s
}

func (s *narrowStage) Apply(x *pipeline.State) *pipeline.Outcome {
	if x.Exempt || !s.Narrows(x.Req.Info.Namespace) {
		return nil
	}
	accept, ok := filter.Accept(x.Out.Header.Values("Accept"))
	if !ok {
		return pipeline.Refusal(status.NotAcceptable("%s are divided among shards, and no accepted media type can be filtered: accept JSON or Kubernetes protobuf", s.resource.Resource))
	}
	if err := s.edit(x); err != nil {
		return pipeline.Refusal(status.BadRequest("%v", err))
	}
	x.Out.Set("Accept", accept)
	// A compressed response would have to be expanded, and costs little to carry
	// uncompressed on the node.
	x.Out.Drop("Accept-Encoding")
	x.Narrowed.Narrowing = s
	x.Responses.Add(s)
	return pipeline.Refusal(x.Memory.Hold(s.weight))
}

// edit makes the apiserver leave out what it can, and include the metadata that decide on
// a row of a table.
func (s *narrowStage) edit(x *pipeline.State) (err error) {
	selector, nothing := s.Selector(x.Req.Info.Namespace)
	if x.Out.Query, err = withMetadata(x.Out.Query); err != nil {
		return err
	}
	if nothing {
		x.Out.Query, err = isolation.Nothing.Narrow(x.Out.Query)
		return err
	}
	added := false
	if x.Out.Query, added, err = withShardSelector(x.Out.Query, selector); added {
		x.Narrowed.ShardSelector = selector
	}
	return err
}

// withShardSelector adds a shardSelector, unless it is empty or the client has its own.
func withShardSelector(raw, selector string) (edited string, added bool, err error) {
	theirs, _, err := query.Get(raw, shardSelector)
	if err != nil || theirs != "" || selector == "" {
		return raw, false, err
	}
	edited, err = query.Set(raw, shardSelector, selector)
	return edited, err == nil, err
}

// withMetadata makes the rows of a table include their metadata.
func withMetadata(raw string) (string, error) {
	rows, _, err := query.Get(raw, includeObject)
	if err != nil || rows != "None" {
		return raw, err
	}
	return query.Set(raw, includeObject, "Metadata")
}

// keep reports whether an object of the response is passed on.
func (s *narrowStage) keep(x *pipeline.State, k filter.Key) bool {
	if s.Assigned(k) {
		x.Narrowed.Mixed.Store(true)
	}
	if s.Owns(k) {
		s.kept.Inc()
		return true
	}
	s.dropped.Inc()
	return false
}

// NoteMethod records how a list, or what a watch begins with, was narrowed. A list echoes
// the selector if the apiserver applied it. A watch does not: the apiserver applied it if
// the watch could have had foreign objects, and had none.
func (s *narrowStage) NoteMethod(x *pipeline.State) {
	if s.methods == nil || !s.Shows(x.Req.Info.Namespace) || s.watch && !x.Narrowed.Mixed.Load() {
		return
	}
	method := isolation.Filtered
	// A watch with injected faults is read by another goroutine.
	if x.Narrowed.ShardSelector != "" && (!s.watch && x.Narrowed.Objects.Echoed() || s.watch && x.Narrowed.Objects.Dropped() == 0 && !x.Narrowed.Unselected) {
		method = isolation.ServerSide
	}
	s.methods.Note(s.resource, method)
}

// Respond removes the objects of other shards from a response.
func (s *narrowStage) Respond(x *pipeline.State, resp *upstream.Response) *pipeline.Outcome {
	if resp.Status/100 != 2 || x.Req.Method == http.MethodHead {
		return nil // no objects
	}
	plain, err := decoded(resp)
	if err == nil {
		x.Narrowed.Objects, err = filter.New(plain, func(k filter.Key) bool { return s.keep(x, k) }, filter.Options{
			ContentType:   resp.Get("Content-Type"),
			Watch:         s.watch,
			ShardSelector: x.Narrowed.ShardSelector,
			Hold:          func(n int) error { return x.Memory.HoldFiltered(s.resource.Resource, n) },
			Give:          x.Memory.GiveFiltered,
		})
	}
	if err != nil {
		return s.unfiltered(x, err)
	}
	body := io.Reader(x.Narrowed.Objects)
	if !s.watch {
		// An error at the beginning of a list can still be answered.
		begun := bufio.NewReaderSize(x.Narrowed.Objects, 4<<10)
		if _, err := begun.Peek(1); err != nil {
			return s.unfiltered(x, err)
		}
		body = begun
	}
	resp.Replace(body)
	resp.Header.Drop("Content-Encoding")
	return nil
}

// decoded returns the body of a response without compression. The apiserver does not
// compress unless asked, but a proxy in between may.
func decoded(resp *upstream.Response) (io.Reader, error) {
	switch encoding := resp.Get("Content-Encoding"); encoding {
	case "", "identity":
		return resp.Body, nil
	case "gzip":
		r, err := gzip.NewReader(resp.Body)
		if err != nil {
			return nil, fmt.Errorf("%w: %w", filter.ErrForm, err)
		}
		return r, nil
	default:
		return nil, fmt.Errorf("%w: encoding %q", filter.ErrType, encoding)
	}
}

// unfiltered answers in place of a response that cannot be filtered.
func (s *narrowStage) unfiltered(x *pipeline.State, err error) *pipeline.Outcome {
	refused, isRefusal := errors.AsType[*apierrors.StatusError](err)
	switch {
	case isRefusal:
		return pipeline.Refusal(refused)
	case errors.Is(err, filter.ErrType), errors.Is(err, filter.ErrSize):
		return pipeline.Refusal(status.NotAcceptable("%s are divided among shards, and the response of the apiserver cannot be filtered: %v: accept JSON, or list in pieces (limit)", s.resource.Resource, err))
	case errors.Is(err, filter.ErrForm):
		x.Plan.Meters.UpstreamErrors.Inc()
		return &pipeline.Outcome{Kind: pipeline.Respond, Status: status.New(http.StatusBadGateway, "BadGateway", 0, "the response of the apiserver is no list of %s: %v", s.resource.Resource, err)}
	}
	return pipeline.Failure(err)
}
