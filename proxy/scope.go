package proxy

import (
	"github.com/ctrlmesh/ctrlmesh/proxy/isolation"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
	"github.com/ctrlmesh/ctrlmesh/proxy/status"
)

// scopeStage narrows a list, watch or deletecollection by a label selector.
type scopeStage struct {
	selector *isolation.Selector
	// shared: it also applies to the lists of shared objects.
	shared bool
}

// newScopeStage returns nil where no selector narrows.
func newScopeStage(p *policy, key match.Kind) stage {
	switch key.Verb {
	case "list", "watch", "deletecollection":
		if selector := p.Selector(key.GroupResource()); selector != nil {
			return &scopeStage{selector, p.SelectsShared()}
		}
	}
	return nil
}

func (s *scopeStage) apply(x *state) *outcome {
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

// sweepStage makes a deletecollection in a namespace of another shard delete nothing: a
// list finds nothing there either.
type sweepStage struct{ isolation.Border }

func (s sweepStage) apply(x *state) *outcome {
	if x.exempt || !s.Foreign(x.req.info.Namespace) {
		return nil
	}
	return (&scopeStage{selector: isolation.Nothing}).apply(x)
}

// exemptStage exempts requests for objects that every shard reads, or writes.
type exemptStage struct{ *isolation.Exemption }

func (s exemptStage) apply(x *state) *outcome {
	if x.exempt {
		return nil
	}
	namespace, name := x.req.info.Namespace, x.req.info.Name
	if s.NeedsName(namespace, name) {
		inBody, refused, err := nameInBody(x)
		if refused != nil {
			return refusal(refused)
		}
		if err == nil {
			name = inBody
		}
	}
	x.exempt = s.Covers(namespace, name)
	return nil
}
