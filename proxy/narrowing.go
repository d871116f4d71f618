package proxy

import (
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/proxy/filter"
	"github.com/ctrlmesh/ctrlmesh/proxy/narrow"
	"github.com/ctrlmesh/ctrlmesh/proxy/query"
	"github.com/ctrlmesh/ctrlmesh/proxy/status"
)

const (
	shardSelector = "shardSelector"
	includeObject = "includeObject"
)

// narrowStage narrows a list or watch of a divided resource to the shard's keys.
// What is answered is filtered, so nothing depends on what the apiserver makes of
// the query; that only saves work. So a shardSelector is always sent where one can
// be: an apiserver that does not know it does not see it, and another behind the
// same address may.
type narrowStage struct {
	resource groupResource
	watch    bool
	owned    sharding.Scope
	shared   shared // objects that stay although another shard owns them
	by       assignment
	// selector is sent as shardSelector; "": none says what is owned.
	selector string
	// weight is what filtering holds at least, in bytes.
	weight        int64
	kept, dropped prometheus.Counter
}

// assignment is what objects of a resource are assigned by.
type assignment int

const (
	byNamespace assignment = iota
	byName                 // of namespaces: their own
	byUID
)

// Bytes that a filter keeps unasked (filter.Options.Hold).
const (
	watchFilterWeight = 8 << 10
	listFilterWeight  = 64 << 10
)

// filters returns the keys that are the shard's where others are left out of lists
// and watches for not being among them.
func (p *policy) filters(res groupResource) (owned sharding.Scope, ok bool) {
	owned, divided := p.limits.Scope(res.group, res.resource)
	return owned, divided && p.method != meshv1.Method_METHOD_LABELS && !owned.Everything()
}

// narrowing returns the stage for a list or watch, nil where scopes narrow nothing.
func (p *policy) narrowing(res groupResource, watch bool) *narrowStage {
	owned, ok := p.filters(res)
	if !ok {
		return nil
	}
	count := func(result string) prometheus.Counter {
		return p.metrics.Counter(p.pod.server.metrics.Filtered, p.metrics.Resource(res.resource), result)
	}
	s := &narrowStage{
		resource: res, watch: watch, owned: owned, shared: p.shared(res, false), weight: listFilterWeight,
		kept: count("kept"), dropped: count("dropped"),
	}
	if watch {
		s.weight = watchFilterWeight
	}
	switch {
	case p.key == meshv1.Key_KEY_OBJECT:
		s.by = byUID
		s.selector, _ = owned.ShardSelector("object.metadata.uid")
	case res == groupResource{"", "namespaces"}:
		s.by = byName // which no shardSelector reads
	default:
		// Objects without a namespace are everybody's. A path does not show whether
		// a resource has such, and needs not: they are those of the namespace "".
		if others, ok := s.shared.namespaces(); ok {
			s.selector, _ = sharding.Union(owned, others, sharding.Keys("")).ShardSelector("object.metadata.namespace")
		}
	}
	if p.method == meshv1.Method_METHOD_FILTER {
		s.selector = ""
	}
	return s
}

func (s *narrowStage) apply(x *exchange) *outcome {
	if x.exempt {
		return nil
	}
	namespace := x.req.info.Namespace
	if !s.narrows(namespace) {
		return nil
	}
	selector, nothing := s.selector, s.owned.Empty() && s.by != byNamespace && len(s.shared) == 0
	switch {
	case s.by != byUID && namespace != "":
		selector, nothing = "", !s.shared.some(namespace)
	case s.by == byUID && (namespace == "" && len(s.shared) > 0 || s.shared.some(namespace)):
		selector = "" // which says nothing of namespaces
	}
	accept, ok := filter.Accept(x.out.header["Accept"])
	if !ok {
		return refusal(status.NotAcceptable("%s are divided among shards, and what is accepted cannot be filtered: accept JSON or Kubernetes protobuf", s.resource.resource))
	}
	if err := s.edit(x, selector, nothing); err != nil {
		return refusal(status.BadRequest("%v", err))
	}
	x.out.set("Accept", accept)
	// What is compressed would have to be expanded to be read, and is cheap to
	// carry where the proxy sits.
	x.out.drop("Accept-Encoding")
	x.narrow = s
	x.responses.add(s)
	return refusal(x.hold(s.weight))
}

// narrows reports whether a list or watch of a namespace is narrowed; "" is all.
func (s *narrowStage) narrows(namespace string) bool {
	return s.by == byUID || namespace == "" || !s.owned.Owns(namespace)
}

// edit has the apiserver leave out what it can, and put in what decides on a row
// of a table.
func (s *narrowStage) edit(x *exchange, selector string, nothing bool) error {
	var err error
	if x.out.query, err = withMetadata(x.out.query); err != nil {
		return err
	}
	if nothing {
		x.out.query, err = narrow.Nothing.Narrow(x.out.query)
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

// withMetadata has the rows of a table carry what decides on them.
func withMetadata(raw string) (string, error) {
	rows, _, err := query.Get(raw, includeObject)
	if err != nil || rows != "None" {
		return raw, err
	}
	return query.Set(raw, includeObject, "Metadata")
}

// keep reports whether an object is passed on.
func (s *narrowStage) keep(k filter.Key) bool {
	owned := s.owns(k)
	if owned {
		s.kept.Inc()
	} else {
		s.dropped.Inc()
	}
	return owned
}

func (s *narrowStage) owns(k filter.Key) bool {
	namespace := k.Namespace
	if s.by == byName {
		namespace = k.Name
	}
	if s.shared.hasKey(namespace, k.Name) {
		return true
	}
	switch s.by {
	case byUID:
		return s.owned.OwnsHash(sharding.Hash(k.UID))
	case byName:
		return s.owned.OwnsHash(sharding.Hash(k.Name))
	}
	return len(k.Namespace) == 0 || s.owned.OwnsHash(sharding.Hash(k.Namespace))
}

// narrowed is what becomes of a list or watch whose response is filtered.
type narrowed struct {
	narrow        *narrowStage   // nil: it is not filtered
	shardSelector string         // that the apiserver was sent for it
	objects       *filter.Reader // the response
	judged        atomic.Bool    // it had objects that could have been foreign
}

// noteMethod remembers for the report how a list was narrowed, or the initial
// events of a watch, which echo nothing: the apiserver narrowed what could have had
// something foreign in it and had not.
func (n *narrowed) noteMethod(as *methods, namespace string) {
	s := n.narrow
	if s == nil || n.objects == nil || s.by != byUID && namespace != "" || s.watch && !n.judged.Load() {
		return
	}
	method := filtering
	// A watch with injected faults is read by another goroutine.
	if n.shardSelector != "" && (!s.watch && n.objects.Echoed() || s.watch && n.objects.Dropped() == 0) {
		method = serverSide
	}
	as.note(s.resource, method)
}
