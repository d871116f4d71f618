package proxy

import (
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
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
