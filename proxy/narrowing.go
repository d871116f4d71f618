package proxy

import (
	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/ctrlmesh/ctrlmesh/proxy/filter"
	"github.com/ctrlmesh/ctrlmesh/proxy/isolation"
	"github.com/ctrlmesh/ctrlmesh/proxy/query"
	"github.com/ctrlmesh/ctrlmesh/proxy/status"
)

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
	methods       *isolation.Methods
}

// Bytes that a filter keeps before it calls filter.Options.Hold.
const (
	watchFilterWeight = 8 << 10
	listFilterWeight  = 64 << 10
)

// newNarrowStage returns the stage for a list or watch, nil where scopes narrow nothing.
func newNarrowStage(p *policy, res schema.GroupResource, watch bool) stage {
	n := p.Narrowing(res)
	if n == nil {
		return nil
	}
	count := func(result string) prometheus.Counter {
		return p.metrics.Counter(p.env.metrics.Filtered, p.metrics.Resource(res.Resource), result)
	}
	s := &narrowStage{Narrowing: n, resource: res, watch: watch, weight: listFilterWeight, kept: count("kept"), dropped: count("dropped"), methods: &p.env.methods}
	if watch {
		s.weight = watchFilterWeight
	}
	return s
}

func (s *narrowStage) apply(x *state) *outcome {
	if x.exempt || !s.Narrows(x.req.info.Namespace) {
		return nil
	}
	accept, ok := filter.Accept(x.out.header["Accept"])
	if !ok {
		return refusal(status.NotAcceptable("%s are divided among shards, and no accepted media type can be filtered: accept JSON or Kubernetes protobuf", s.resource.Resource))
	}
	if err := s.edit(x); err != nil {
		return refusal(status.BadRequest("%v", err))
	}
	x.out.set("Accept", accept)
	// A compressed response would have to be expanded, and costs little to carry
	// uncompressed on the node.
	x.out.drop("Accept-Encoding")
	x.narrowing = s
	x.responses.add(s)
	return refusal(x.hold(s.weight))
}

// edit makes the apiserver leave out what it can, and include the metadata that decide on
// a row of a table.
func (s *narrowStage) edit(x *state) (err error) {
	selector, nothing := s.Selector(x.req.info.Namespace)
	if x.out.query, err = withMetadata(x.out.query); err != nil {
		return err
	}
	if nothing {
		x.out.query, err = isolation.Nothing.Narrow(x.out.query)
		return err
	}
	theirs, _, err := query.Get(x.out.query, shardSelector)
	if err != nil || theirs != "" || selector == "" {
		return err
	}
	x.shardSelector = selector
	x.out.query, err = query.Set(x.out.query, shardSelector, selector)
	return err
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
func (s *narrowStage) keep(x *state, k filter.Key) bool {
	if s.Assigned(k) {
		x.judged.Store(true)
	}
	if s.Owns(k) {
		s.kept.Inc()
		return true
	}
	s.dropped.Inc()
	return false
}

// noteMethod records how a list, or the initial events of a watch, were narrowed. A list
// echoes the selector if the apiserver applied it. A watch does not: the apiserver applied
// it if the watch could have had foreign objects, and had none.
func (s *narrowStage) noteMethod(x *state) {
	if !s.Shows(x.req.info.Namespace) || s.watch && !x.judged.Load() {
		return
	}
	method := isolation.Filtered
	// A watch with injected faults is read by another goroutine.
	if x.shardSelector != "" && (!s.watch && x.objects.Echoed() || s.watch && x.objects.Dropped() == 0) {
		method = isolation.ServerSide
	}
	s.methods.Note(s.resource, method)
}
