package stages

import (
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
	"github.com/ctrlmesh/ctrlmesh/proxy/pipeline"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/header"
)

// userAgentStage sets the User-Agent that the apiserver receives. It is the last stage that
// edits the head, so that rules match the client's own.
type userAgentStage struct {
	value  string // replaces the client's
	prefix string // or is put before it
}

// newUserAgentStage returns nil where requests keep their User-Agent.
func newUserAgentStage(p *Policy, _ match.Kind) pipeline.Stage {
	s := p.Message.GetSharding()
	if s.GetDryRun() || s.GetUserAgent() == "" && s.GetUserAgentPrefix() == "" {
		return nil
	}
	return &userAgentStage{s.GetUserAgent(), s.GetUserAgentPrefix()}
}

func (s *userAgentStage) Apply(x *pipeline.State) *pipeline.Outcome {
	x.Out.Set("User-Agent", s.of(x.Out.Header))
	return nil
}

// of returns the User-Agent of a request with a head.
func (s *userAgentStage) of(h header.Fields) string {
	if s.value != "" {
		return s.value
	}
	return s.prefix + h.Get("User-Agent")
}
