package proxy

import (
	"net/http"

	apirequest "k8s.io/apiserver/pkg/endpoints/request"

	"github.com/ctrlmesh/ctrlmesh/proxy/match"
	"github.com/ctrlmesh/ctrlmesh/proxy/metrics"
	"github.com/ctrlmesh/ctrlmesh/proxy/status"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/upstream"
)

// stage is one decision about a request on its way up. It edits what goes upstream, or
// ends the request.
type stage interface {
	apply(x *state) *outcome
}

// stages are applied in turn. The first that ends the request is the last.
type stages []stage

// add appends those that have something to do.
func (s *stages) add(all ...stage) {
	for _, one := range all {
		if one != nil {
			*s = append(*s, one)
		}
	}
}

func (s stages) apply(x *state) *outcome {
	for _, one := range s {
		if end := one.apply(x); end != nil {
			return end
		}
	}
	return nil
}

// plan is how a policy handles one verb of one resource.
type plan struct {
	key match.Kind
	// stages edit the request in turn. The first that ends the request is the last.
	stages stages
	route  route
	// urgent reports whether a request is about a lock, by its head; nil: none is.
	urgent func(*apirequest.RequestInfo) bool
	meters *metrics.Meters
}

// badResponse answers instead of an invalid response.
func (p *plan) badResponse(about string, err error) *outcome {
	p.meters.UpstreamErrors.Inc()
	return &outcome{kind: respond, status: status.New(http.StatusBadGateway, "BadGateway", 0, "the response about %s cannot be read: %v", about, err)}
}

// route is how a response is passed on.
type route int

const (
	// short: the response ends soon, and is logged then.
	short route = iota
	// stream: the response may last for hours. It is flushed after every read, and logged
	// when it begins.
	stream
)

// routeOf returns the route of the responses to a verb of a resource.
func routeOf(key match.Kind) route {
	switch {
	case key.Verb == "watch", key.Verb == "proxy",
		key.Group == "" && key.Subresource == "proxy", // of other groups it may be anything
		key.Group == "" && key.Resource == "pods" && key.Subresource == "log":
		return stream
	}
	return short
}

// responseStage edits a response on its way down, or ends the exchange.
type responseStage interface {
	respond(x *state, r *upstream.Response) *outcome
}

// responseStages are those that the stages of a request added, in their order.
type responseStages struct {
	n   int
	all [4]responseStage
}

func (s *responseStages) add(one responseStage) {
	s.all[s.n] = one
	s.n++
}

// only removes all stages before, and adds one.
func (s *responseStages) only(one responseStage) {
	s.n = 0
	s.add(one)
}

func (s *responseStages) respond(x *state, r *upstream.Response) *outcome {
	for _, one := range s.all[:s.n] {
		if end := one.respond(x, r); end != nil {
			return end
		}
	}
	return nil
}
