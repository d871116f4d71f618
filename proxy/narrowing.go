package proxy

import (
	"sync/atomic"

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
}

// Bytes that a filter keeps before it calls filter.Options.Hold.
const (
	watchFilterWeight = 8 << 10
	listFilterWeight  = 64 << 10
)

// narrowStage returns the stage for a list or watch, nil where scopes narrow nothing.
func (p *policy) narrowStage(res schema.GroupResource, watch bool) stage {
	n := p.Narrowing(res)
	if n == nil {
		return nil
	}
	count := func(result string) prometheus.Counter {
		return p.metrics.Counter(p.pod.server.metrics.Filtered, p.metrics.Resource(res.Resource), result)
	}
	s := &narrowStage{Narrowing: n, resource: res, watch: watch, weight: listFilterWeight, kept: count("kept"), dropped: count("dropped")}
	if watch {
		s.weight = watchFilterWeight
	}
	return s
}

func (s *narrowStage) apply(x *exchange) *outcome {
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
	x.narrow = s
	x.responses.add(s)
	return refusal(x.hold(s.weight))
}

// edit makes the apiserver leave out what it can, and include the metadata that decide on
// a row of a table.
func (s *narrowStage) edit(x *exchange) (err error) {
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

// narrowed is the state of a list or watch whose response is filtered.
type narrowed struct {
	narrow        *narrowStage   // nil: it is not filtered
	shardSelector string         // that was sent to the apiserver
	objects       *filter.Reader // the response
	judged        atomic.Bool    // it had objects that could be foreign
}

// noteMethod records how a list, or the initial events of a watch, were narrowed. A list
// echoes the selector if the apiserver applied it. A watch does not: the apiserver applied
// it if the watch could have had foreign objects, and had none.
func (n *narrowed) noteMethod(as *isolation.Methods, namespace string) {
	s := n.narrow
	if s == nil || n.objects == nil || !s.Shows(namespace) || s.watch && !n.judged.Load() {
		return
	}
	method := isolation.Filtered
	// A watch with injected faults is read by another goroutine.
	if n.shardSelector != "" && (!s.watch && n.objects.Echoed() || s.watch && n.objects.Dropped() == 0) {
		method = isolation.ServerSide
	}
	as.Note(s.resource, method)
}

// Methods returns how lists and watches of the resources that the policy in force divides,
// as resource.group, were narrowed last: "ServerSide", "Labels" or "Filter".
func (p *Pod) Methods() map[string]string {
	if pol := p.policy.Load(); pol != nil {
		return p.methods.Of(pol.Division)
	}
	return nil
}
