package stages

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"path"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/ctrlmesh/ctrlmesh/proxy/filter"
	"github.com/ctrlmesh/ctrlmesh/proxy/isolation"
	"github.com/ctrlmesh/ctrlmesh/proxy/lock"
	"github.com/ctrlmesh/ctrlmesh/proxy/pipeline"
	"github.com/ctrlmesh/ctrlmesh/proxy/query"
	"github.com/ctrlmesh/ctrlmesh/proxy/relist"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/upstream"
)

// difference returns what the client of a watch sees now, and did not always under the
// policies before, or the other way round; nil if it must list to find out.
func (p *Policy) difference(before []relist.Policy, x *pipeline.State) *isolation.Difference {
	info, q := x.Req.Info, pipeline.Parameters(x.Req.Query)
	switch {
	case x.Req.Cluster != "" && !p.Division.DividesMemberClusters(): // all of it, or nothing
		return nil
	case x.Lock.Named != nil, p.denies(x.Req.Header.Get("User-Agent")):
		return nil
	case transform(x.Out.Header.Get("Accept")) == "Table": // the rows of a list have no event
		return nil
	case !pipeline.IsTrue(q["allowWatchBookmarks"]): // the version of such a client would go back
		return nil
	case q.Get("watch") == "" || strings.Contains(x.Req.Path, path.Join("/", info.APIPrefix, info.APIGroup, info.APIVersion, "watch")+"/"):
		return nil // deprecated paths
	}
	var divisions []*isolation.Division
	for _, b := range before {
		old := b.(*Policy)
		if lock.Kind(info.APIGroup, info.Resource) && !p.Locks.Equal(old.Locks) || x.Req.Cluster != "" && !old.Division.DividesMemberClusters() {
			return nil
		}
		divisions = append(divisions, old.Division)
	}
	if diff, ok := p.Division.Difference(divisions, x.Plan.Key, info.Namespace, info.Name); ok {
		return diff
	}
	return nil
}

// supplementStage makes a watch begin with what the cache of its client misses since the keys
// of the shard changed: the objects that it gained as ADDED, and those that it lost as DELETED.
// Both are as they were at the version from which the watch resumes, so all that happened
// since is in the watch. A bookmark at that version ends them.
//
// The client need not list. client-go waits between lists, a minute at worst, and meanwhile
// writes of the objects gained are refused.
type supplementStage struct {
	policy   *Policy
	resource schema.GroupResource
	diff     *isolation.Difference
	version  string
}

// Respond requests the difference, once the watch is open. The client must list if it cannot
// be had.
func (s *supplementStage) Respond(x *pipeline.State, resp *upstream.Response) *pipeline.Outcome {
	if resp.Status != http.StatusOK {
		return nil
	}
	body, err := s.begin(x, resp)
	switch cause := context.Cause(x.Ctx); {
	case cause != nil:
		if err == nil {
			_ = body.close()
		}
		return pipeline.Failure(cause)
	case err != nil:
		x.Resumption.Ticket.Expire(s.version)
		return s.policy.redivided(s.resource.Resource, s.version)
	}
	resp.Body = body // which closes the list, too
	resp.Header.Drop("Content-Length")
	return nil
}

// begin reads up to the first event.
func (s *supplementStage) begin(x *pipeline.State, watch *upstream.Response) (*supplemented, error) {
	if encoding := watch.Get("Content-Encoding"); encoding != "" {
		return nil, fmt.Errorf("%w: encoding %q", filter.ErrType, encoding)
	}
	out := &supplemented{supplement: &supplement{stage: s, x: x}, watch: watch.Body}
	if err := s.request(out.supplement, watch.Get("Content-Type")); err != nil {
		return nil, err
	}
	if err := out.fill(); err != nil {
		_ = out.close()
		return nil, err
	}
	return out, nil
}

// count counts a watch that has brought the difference.
func (s *supplementStage) count() {
	p := s.policy
	p.Tally.Metrics.Counter(p.env.Metrics.Supplemented, p.Tally.Metrics.Resource(s.resource.Resource)).Inc()
}

// request requests the objects that may differ.
func (s *supplementStage) request(out *supplement, contentType string) error {
	x := out.x
	asked, err := s.query(out)
	if err != nil {
		return err
	}
	accept, ok := filter.Accept(x.Out.Header.Values("Accept"))
	if !ok {
		return filter.ErrType
	}
	resp, err := s.policy.read(x.Ctx, x, x.Out.Path+"?"+asked, accept)
	if err != nil {
		return err
	}
	out.list = resp.Body
	if resp.Status != http.StatusOK || !filter.SameType(contentType, resp.Get("Content-Type")) {
		err = fmt.Errorf("status %d, %s", resp.Status, resp.Get("Content-Type"))
	} else if err = out.hold(filter.ListBuffer); err == nil {
		out.items, err = filter.NewItems(resp.Body, filter.Options{ContentType: resp.Get("Content-Type"), Hold: out.hold})
	}
	if err != nil {
		_ = out.close()
	}
	return err
}

var errNoRoom = errors.New("no room to read objects")

// ofWatches are parameters that the list of a watch's objects must not have.
var ofWatches = []string{"watch", "allowWatchBookmarks", "sendInitialEvents", "timeoutSeconds", "limit", "continue"}

// query returns the query of the list: the client's own selectors, and what selects the
// objects that may differ.
func (s *supplementStage) query(of *supplement) (asked string, err error) {
	if asked, err = query.Delete(of.x.Req.Query, ofWatches...); err != nil {
		return "", err
	}
	selector, shards := s.diff.Selectors()
	of.shards = shards != ""
	if selector != nil {
		if asked, err = selector.Narrow(asked); err != nil {
			return "", err
		}
	}
	if asked, _, err = withShardSelector(asked, shards); err != nil {
		return "", err
	}
	return query.Set(asked, "resourceVersionMatch", string(metav1.ResourceVersionMatchExact))
}

// supplemented is a watch that begins with a supplement.
type supplemented struct {
	*supplement // nil once it has been read
	watch       io.ReadCloser
}

func (b *supplemented) Read(p []byte) (int, error) {
	if b.supplement != nil {
		n, err := b.supplement.Read(p)
		if !errors.Is(err, io.EOF) {
			return n, err
		}
		_ = b.close()
		b.supplement = nil
	}
	return b.watch.Read(p)
}

func (b *supplemented) Close() error {
	if b.supplement != nil {
		return errors.Join(b.close(), b.watch.Close())
	}
	return b.watch.Close()
}

// supplement reads events about the objects that differ.
type supplement struct {
	stage  *supplementStage
	x      *pipeline.State
	items  *filter.Items
	list   io.Closer // of the items
	shards bool      // the list has a shardSelector
	out    []byte    // the unread rest of an event
	marked bool      // the bookmark has been read
	held   int64     // bytes
}

// hold takes n bytes of the pod's budget until the end of the supplement.
func (s *supplement) hold(n int) error {
	if !s.x.Memory.Budgets.Withhold(int64(n)) {
		return errNoRoom
	}
	s.held += int64(n)
	return nil
}

// close ends the supplement, and gives back what it holds.
func (s *supplement) close() error {
	s.x.Memory.Budgets.Filtered.Give(s.held)
	s.held = 0
	return s.list.Close()
}

// Read returns io.EOF after the last event, once its reader has come back for more and so
// has passed that on.
func (s *supplement) Read(p []byte) (int, error) {
	if err := s.fill(); err != nil {
		return 0, fmt.Errorf("reading what the shard gained and lost: %w", err)
	}
	if len(s.out) == 0 {
		s.x.NoteMethod()
		s.x.Resumption.Begun(true)
		s.stage.count()
		return 0, io.EOF
	}
	n := copy(p, s.out)
	s.out = s.out[n:]
	return n, nil
}

// fill reads the next event, unless some of the last is left or there is none.
func (s *supplement) fill() (err error) {
	for len(s.out) == 0 && !s.marked && err == nil {
		s.out, err = s.next()
	}
	return err
}

// next returns the next event; none for an object that does not differ.
func (s *supplement) next() ([]byte, error) {
	item, err := s.items.Next()
	ended := errors.Is(err, io.EOF)
	if err != nil && !ended {
		return nil, err
	}
	// An apiserver that does not support exact versions returns another list. Of custom
	// resources the version comes last.
	if got := s.items.Revision(); got != s.stage.version && (ended || got != "") {
		return nil, fmt.Errorf("%w: a list at resource version %q, not %q", filter.ErrForm, got, s.stage.version)
	}
	if ended {
		s.marked = true
		return s.items.Bookmark()
	}
	gained, lost := s.stage.diff.Compare(item.Key)
	if s.shards {
		s.x.Narrowed.Mixed.Store(true)
		s.x.Narrowed.Unselected = s.x.Narrowed.Unselected || !gained && !lost
	}
	switch {
	case gained:
		return s.items.Event("ADDED", item)
	case lost:
		return s.items.Event("DELETED", item)
	}
	return nil, nil
}
