package stages

import (
	"context"
	"net/http"
	"net/url"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/ctrlmesh/ctrlmesh/proxy/pipeline"
	"github.com/ctrlmesh/ctrlmesh/proxy/relist"
	"github.com/ctrlmesh/ctrlmesh/proxy/status"
)

// relistStage keeps the ledger for a list or a watch of one resource.
type relistStage struct {
	policy   *Policy
	resource schema.GroupResource
	watch    bool
}

func (s *relistStage) Apply(x *pipeline.State) *pipeline.Outcome {
	q := pipeline.Parameters(x.Req.Query) // the client's own: stages have edited what is sent
	var end context.CancelCauseFunc
	if s.watch {
		x.Ctx, end = context.WithCancelCause(x.Ctx)
	}
	if x.Ticket = s.policy.env.Ledger.Enter(s.policy, s.resource, viewOf(x, q), end); x.Ticket == nil {
		return pipeline.Restart
	}
	initial := s.watch && truthy(q["sendInitialEvents"])
	if initial {
		x.Initial = &pipeline.InitialEvents{}
	}
	x.Fills = !s.watch && q.Get("continue") == "" || initial
	if version := q.Get("resourceVersion"); s.watch && !initial && version != "" && version != "0" {
		return pipeline.Refusal(s.resume(x, version))
	}
	return nil
}

func viewOf(x *pipeline.State, q url.Values) relist.View {
	return relist.Words{
		Path:   strings.TrimRight(x.Req.Path, "/"),
		Labels: q.Get("labelSelector"),
		Fields: q.Get("fieldSelector"),
		As:     transform(x.Out.Header.Get("Accept")),
		Agent:  x.Out.Header.Get("User-Agent"),
	}.View()
}

// resume refuses a watch from a resource version whose client must list first.
func (s *relistStage) resume(x *pipeline.State, version string) *apierrors.StatusError {
	expired := func(format string, args ...any) *apierrors.StatusError {
		return status.New(http.StatusGone, metav1.StatusReasonExpired, 0, format, args...)
	}
	resource := s.resource.Resource
	switch {
	case x.Ticket.Missed(version):
		return expired("faults were injected into a watch of %s, and events kept back when it ended: list again", resource)
	case x.Ticket.Resumable(s.policy, version):
		return nil
	case x.Ticket.Doubtful(s.policy):
		return expired("faults may have kept events of %s from watches of an earlier proxy, which is gone: list again", resource)
	}
	return expired("what shard %q sees of %s has changed since resource version %s: list again", s.policy.Shard, resource, version)
}

// truthy parses a boolean parameter as the apiserver does.
func truthy(values []string) bool {
	return len(values) > 0 && values[0] != "0" && !strings.EqualFold(values[0], "false")
}

// transform returns the kind into which an Accept header requests objects to be converted.
// Lists and watches of one client spell it differently with the same meaning.
func transform(accept string) string {
	switch {
	case strings.Contains(accept, "as=PartialObjectMetadata"):
		return "PartialObjectMetadata"
	case strings.Contains(accept, "as=Table"):
		return "Table"
	}
	return ""
}
