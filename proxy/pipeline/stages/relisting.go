package stages

import (
	"context"
	"net/http"
	"net/url"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/fault"
	"github.com/ctrlmesh/ctrlmesh/proxy/filter"
	"github.com/ctrlmesh/ctrlmesh/proxy/isolation"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
	"github.com/ctrlmesh/ctrlmesh/proxy/pipeline"
	"github.com/ctrlmesh/ctrlmesh/proxy/query"
	"github.com/ctrlmesh/ctrlmesh/proxy/relist"
	"github.com/ctrlmesh/ctrlmesh/proxy/status"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/upstream"
)

// relistStage keeps the ledger for a list or a watch of one resource.
type relistStage struct {
	policy   *Policy
	resource schema.GroupResource
	watch    bool
}

// newRelistStage returns nil for requests that are no list or watch.
func newRelistStage(p *Policy, key match.Kind) pipeline.Stage {
	if key.Verb != "list" && key.Verb != "watch" {
		return nil
	}
	return &relistStage{policy: p, resource: key.GroupResource(), watch: key.Verb == "watch"}
}

func (s *relistStage) Apply(x *pipeline.State) *pipeline.Outcome {
	q := pipeline.Parameters(x.Req.Query) // the client's own: stages have edited what is sent
	var end context.CancelCauseFunc
	if s.watch {
		x.Ctx, end = context.WithCancelCause(x.Ctx)
	}
	if x.Resumption.Ticket = s.policy.env.Ledger.Enter(s.policy, relist.Resource{Cluster: x.Req.Cluster, GroupResource: s.resource}, viewOf(x, q), end); x.Resumption.Ticket == nil {
		return pipeline.Restart
	}
	initial := s.watch && pipeline.IsTrue(q["sendInitialEvents"])
	if initial {
		x.Resumption.Initial = &pipeline.InitialEvents{}
	}
	x.Resumption.Fills = !s.watch && q.Get("continue") == "" || initial
	switch version := q.Get("resourceVersion"); {
	case !s.watch || initial:
	case version == "" || version == "0": // begins with the objects there are, sorted by name
		x.Resumption.Ticket.Unordered()
		x.Narrowed.Unmarked = true
	default:
		return s.resume(x, version)
	}
	return nil
}

func viewOf(x *pipeline.State, q url.Values) relist.View {
	return relist.Words{
		Cluster: x.Req.Cluster,
		Path:    strings.TrimRight(x.Req.Path, "/"),
		Labels:  q.Get("labelSelector"),
		Fields:  q.Get("fieldSelector"),
		As:      transform(x.Out.Header.Get("Accept")),
		Agent:   x.Out.Header.Get("User-Agent"),
		Name:    x.Req.Info.Name,
	}.View()
}

// resume lets a watch go on, has it begin with a supplement, or refuses it so that its client
// lists.
func (s *relistStage) resume(x *pipeline.State, version string) *pipeline.Outcome {
	if x.Resumption.Ticket.Missed(version) {
		return expired("faults were injected into a watch of %s, and events kept back when it ended: list again", s.resource.Resource)
	}
	how, before := x.Resumption.Ticket.Resume(s.policy, version)
	switch how {
	case relist.Plain:
		return nil
	case relist.Over:
		return pipeline.Restart
	case relist.Supplemented:
		if diff := s.policy.difference(before, x); diff != nil {
			if x.Resumption.Behind = !diff.Empty(); x.Resumption.Behind {
				x.Responses.Last(&supplementStage{s.policy, s.resource, diff, version})
			}
			return nil
		}
		x.Resumption.Ticket.Expire(version)
	case relist.Expired:
		if x.Resumption.Ticket.Doubtful(s.policy) {
			return expired("faults may have kept events of %s from watches of an earlier proxy, which is gone: list again", s.resource.Resource)
		}
	}
	return s.policy.redivided(s.resource.Resource, version)
}

func expired(format string, args ...any) *pipeline.Outcome {
	return pipeline.Refusal(status.New(http.StatusGone, metav1.StatusReasonExpired, 0, format, args...))
}

// redivided has the client of a watch list.
func (p *Policy) redivided(resource, version string) *pipeline.Outcome {
	return expired("what shard %q sees of %s has changed since resource version %s: list again", p.Shard, resource, version)
}

// catchUpStage refuses writes of objects that the pod has gained, until its caches have them.
// The refusal is a conflict, so that a controller reads and decides again: clients repeat a
// request that is refused with 429 or 503 as it is.
type catchUpStage struct {
	policy *Policy
	key    match.Kind
}

// newCatchUpStage returns nil for requests that are no decision about objects of a shard.
func newCatchUpStage(p *Policy, key match.Kind) pipeline.Stage {
	if !isResource(key) || !key.Writes() || key.Connects() || key.Resource == "events" || p.Division.Standby || !p.Division.Divides() {
		return nil
	}
	return catchUpStage{p, key}
}

func (s catchUpStage) Apply(x *pipeline.State) *pipeline.Outcome {
	if x.Exempt || x.Lock.Named != nil {
		return nil
	}
	return s.policy.catchingUp(x, func(before *isolation.Division) bool {
		if s.key.MemberCluster && !s.policy.Division.DividesMemberClusters() {
			return s.policy.Division.GainsCluster(before, x.Req.Cluster)
		}
		return s.policy.Division.Gains(before, s.key, x.Req.Info.Namespace, x.Req.Info.Name)
	})
}

// catchingUp refuses a write if some cache of the pod was filled under a division before
// which gained is true of.
func (p *Policy) catchingUp(x *pipeline.State, gained func(before *isolation.Division) bool) *pipeline.Outcome {
	behind := p.env.Ledger.CatchingUp(x.Req.Cluster, func(before relist.Policy) bool {
		if before == nil {
			return gained(p.Division.InStandby())
		}
		return gained(before.(*Policy).Division)
	})
	if !behind {
		return nil
	}
	return pipeline.RefusalFor(meshv1.RefusedCatchUp, status.New(http.StatusConflict, metav1.StatusReasonConflict, 0,
		"%s %s: the object came to this pod's shard, ShardingConfig %s/%s, just now, and not all caches of pod %s have it yet: read it, and decide again",
		x.Req.Info.Verb, x.Req.Info.Resource, p.env.Info.Namespace, p.Shard, p.env.ID))
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

// The apiserver is asked for a stale list: for the list at a resource version that the pod
// saw in an earlier list or watch. So it is complete, paged and narrowed as any other, and
// a watch from there on brings its client up to date.

// staleness is the stage for lists or watches of a resource whose lists can be stale.
type staleness struct {
	lists *fault.Resources
	seen  *relist.History
}

// newStaleness returns nil where no rule is about lists of a resource, and in member clusters, which
// have other resource versions.
func newStaleness(p *Policy, key match.Kind) pipeline.Stage {
	if key.MemberCluster || key.Verb != "list" && key.Verb != "watch" {
		return nil
	}
	lists := p.lists(key)
	oldest := lists.Oldest()
	if oldest == 0 {
		return nil
	}
	if seen := p.env.Rules.Histories.Of(key.GroupResource(), oldest); seen != nil {
		return &staleness{lists, seen}
	}
	return nil
}

// lists returns the rules for lists of a key's resource.
func (p *Policy) lists(key match.Kind) *fault.Resources {
	return p.Traffic.faults.OfKind(match.Kind{Verb: "list", Group: key.Group, Resource: key.Resource, Subresource: key.Subresource})
}

// refuseInitialEvents refuses a watch that would begin with the objects of a list, if lists
// can be stale. An apiserver without such watches does the same, and the client lists.
func (s *staleness) refuseInitialEvents(x *pipeline.State) *apierrors.StatusError {
	if x.Resumption.Initial == nil {
		return nil
	}
	if o := x.Object(); !s.lists.MayBeStale(time.Now(), &o) {
		return nil
	}
	return status.New(http.StatusUnprocessableEntity, metav1.StatusReasonInvalid, 0,
		"sendInitialEvents is forbidden while a FaultInjection makes lists of %s stale: list, and watch from there", x.Req.Info.Resource)
}

// ask requests a list of the given age, if the list begins with this request and the pod
// has seen the resource before.
func (s *staleness) ask(x *pipeline.State, age time.Duration) {
	more, _, err := query.Get(x.Out.Query, "continue")
	version := s.seen.At(time.Now().Add(-age))
	if err != nil || more != "" || version == "" {
		return
	}
	asked, err := query.Set(x.Out.Query, "resourceVersion", version)
	if err != nil {
		return
	}
	asked, err = query.Set(asked, "resourceVersionMatch", string(metav1.ResourceVersionMatchExact))
	if err != nil {
		return
	}
	x.Stale = pipeline.StaleList{Version: version, Fresh: x.Out.Query, Seen: s.seen}
	x.Out.Query = asked
}

// Apply makes the versions in the response readable.
func (s *staleness) Apply(x *pipeline.State) *pipeline.Outcome {
	x.Out.Drop("Accept-Encoding")
	if x.Lock.Named == nil {
		x.Responses.Add(s)
	}
	return nil
}

// Respond records the versions in a response.
func (s *staleness) Respond(x *pipeline.State, resp *upstream.Response) *pipeline.Outcome {
	if resp.Status != http.StatusOK || x.Req.Method != http.MethodGet || resp.Get("Content-Encoding") != "" {
		return nil
	}
	q := pipeline.Parameters(x.Req.Query)
	see := func(version []byte) { s.seen.See(time.Now(), version) }
	if x.Req.Info.Verb == "watch" {
		events, err := filter.NewEvents(resp.Body, filter.Options{
			ContentType: resp.Get("Content-Type"),
			Hold:        func(n int) error { return x.Memory.HoldFiltered(x.Req.Info.Resource, n) },
			Give:        x.Memory.GiveFiltered,
		})
		if err == nil {
			from := q.Get("resourceVersion")
			initial := from == "" || from == "0" || x.Resumption.Initial != nil
			resp.Wrap(relist.EventVersions(events, initial, see))
		}
		return nil
	}
	if x.Stale.Version == "" && q.Get("continue") == "" && q.Get("resourceVersionMatch") != string(metav1.ResourceVersionMatchExact) {
		resp.Wrap(relist.ListVersion(resp.Body, see))
	}
	return nil
}
