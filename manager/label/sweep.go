package label

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/time/rate"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/util/workqueue"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/internal/wake"
	"github.com/ctrlmesh/ctrlmesh/manager/metrics"
	"github.com/ctrlmesh/ctrlmesh/manager/platform"
)

const (
	pageSize = 500
	workers  = 8
	// againAfter is the time after which a sweep repeats when the rules have changed. Until the
	// apiservers have the new rules, objects are created without labels.
	againAfter = 30 * time.Second
	// AggregateLabel on a ClusterRole adds its permissions to those of the sweep.
	AggregateLabel = v1alpha1.GroupName + "/aggregate-to-stamp"
)

// unstamped are selectors for the objects that need labels.
var unstamped = []string{
	"!" + v1alpha1.NamespaceLabel,
	v1alpha1.NamespaceLabel + ",!" + v1alpha1.ShardingHashLabel,
}

// Sweeper labels existing objects. It walks each resource once for all configurations, and
// repeats that regularly.
type Sweeper struct {
	// Metadata must not limit the rate by itself.
	Metadata metadata.Interface
	// Served lists what the apiserver serves, in preferred versions.
	Served func() ([]*metav1.APIResourceList, error)
	// Limiter bounds the writes.
	Limiter *rate.Limiter
	// Skip is the mesh's own namespace, whose objects are not labelled.
	Skip string
	// Settings returns the administrator's settings.
	Settings func() *platform.Settings
	// Every is the time between repeats.
	Every time.Duration
	// Changed is called, from any goroutine, when the result of Status changes.
	Changed func()
	Log     *slog.Logger

	mu       sync.Mutex
	poke     wake.Flag
	once     sync.Once
	visited  workqueue.TypedDelayingInterface[string] // namespaces; by queue
	configs  []*v1alpha1.ShardingConfig
	allowed  *platform.Settings // the settings at the last Set
	resumed  map[types.UID]v1alpha1.StampingStatus
	progress map[schema.GroupResource]*progress
	discovered
}

// discovered is the result of the last discovery.
type discovered struct {
	served  []*metav1.APIResourceList
	failing error // of discovery
}

// progress of one resource.
type progress struct {
	walking       bool
	done          bool
	next          string // the continue token
	seen, stamped int64
	err           error
}

// Set sets the configurations whose resources must be labelled.
func (s *Sweeper) Set(configs []*v1alpha1.ShardingConfig) {
	s.mu.Lock()
	defer s.mu.Unlock()
	before := fmt.Sprint(Listed(s.configs...))
	resumed := make(map[types.UID]v1alpha1.StampingStatus, len(configs))
	for _, c := range configs {
		if was, known := s.resumed[c.UID]; known {
			resumed[c.UID] = was
			continue
		}
		resumed[c.UID] = v1alpha1.StampingStatus{}
		if c.Status.Stamping != nil {
			resumed[c.UID] = *c.Status.Stamping
			s.resume(c.Status.Stamping)
		}
	}
	first := s.configs == nil
	settings := s.Settings()
	if !first && !reflect.DeepEqual(s.allowed, settings) {
		// Resources that were excluded when they were walked may be allowed now.
		for _, p := range s.progress {
			p.done = false
		}
		first = true
	}
	s.configs, s.resumed, s.allowed = configs, resumed, settings
	if first || fmt.Sprint(Listed(configs...)) != before {
		s.poke.Set()
	}
}

// resume continues where the last leader stopped.
func (s *Sweeper) resume(st *v1alpha1.StampingStatus) {
	for _, name := range st.Completed {
		s.of(schema.ParseGroupResource(name)).done = true
	}
	if st.Resource != "" {
		if p := s.of(schema.ParseGroupResource(st.Resource)); !p.done && !p.walking {
			p.next = st.Continue
		}
	}
}

func (s *Sweeper) of(gr schema.GroupResource) *progress {
	p := s.progress[gr]
	if p == nil {
		if s.progress == nil {
			s.progress = map[schema.GroupResource]*progress{}
		}
		p = &progress{}
		s.progress[gr] = p
	}
	return p
}

// queue returns the namespaces to visit.
func (s *Sweeper) queue() workqueue.TypedDelayingInterface[string] {
	s.once.Do(func() { s.visited = workqueue.NewTypedDelayingQueue[string]() })
	return s.visited
}

// Run walks until the context ends.
func (s *Sweeper) Run(ctx context.Context) error {
	go s.visits(ctx)
	next := s.Every
	for {
		repeat := false
		select {
		case <-ctx.Done():
			return nil
		case <-s.poke.Wait():
			next = min(againAfter, s.Every)
		case <-time.After(next):
			repeat = true
			next = s.Every
		}
		if !s.Pass(ctx, repeat) {
			next = min(time.Minute, s.Every)
		}
	}
}

// Pass walks the resources that were not walked yet; with repeat, all of them. It reports
// whether that succeeded.
func (s *Sweeper) Pass(ctx context.Context, repeat bool) bool {
	served, err := s.Served()
	s.mu.Lock()
	configs := s.configs
	if len(served) > 0 {
		s.served = served
	}
	s.failing = err
	found, _ := s.resolve(Listed(configs...))
	if err == nil {
		// Objects of resources that no configuration lists are not stamped meanwhile.
		maps.DeleteFunc(s.progress, func(gr schema.GroupResource, _ *progress) bool {
			return !slices.ContainsFunc(found, func(f schema.GroupVersionResource) bool { return f.GroupResource() == gr })
		})
	}
	s.mu.Unlock()
	ok := err == nil
	for _, gvr := range found {
		s.mu.Lock()
		p := s.of(gvr.GroupResource())
		skip := p.done && !repeat
		s.mu.Unlock()
		if skip {
			continue
		}
		err := s.walk(ctx, gvr, p)
		if ctx.Err() != nil {
			return false
		}
		if err != nil {
			ok = false
			s.log().Warn("failed to label objects", "resource", gvr.GroupResource().String(), "error", err)
		}
		s.mu.Lock()
		p.walking, p.err, p.next = false, err, ""
		// A repeat that fails does not make the resource incomplete.
		p.done = p.done || err == nil
		s.mu.Unlock()
		s.Changed()
	}
	s.Changed()
	return ok
}

// resolve is Resolve without the resources that the administrator excludes.
func (s *Sweeper) resolve(groups []v1alpha1.ResourceGroup) (found []schema.GroupVersionResource, missing []string) {
	settings := s.Settings()
	found, missing = Resolve(Permitted(groups, settings), s.served)
	return slices.DeleteFunc(found, func(gvr schema.GroupVersionResource) bool { return !settings.Stamps(gvr.GroupResource()) }), missing
}

// excluded describes the resources that the administrator excludes.
func (s *Sweeper) excluded(c *v1alpha1.ShardingConfig) (problems []string) {
	settings := s.Settings()
	for _, l := range Limits(c) {
		for _, gr := range Resources(l.RelateResources) {
			if Needed(c, l) && !settings.Stamps(gr) {
				problems = append(problems, fmt.Sprintf("%s is not labelled: %s of ConfigMap %s excludes it", gr, platform.StampingExcludedResources, platform.ConfigMap))
			}
		}
	}
	return problems
}

func (s *Sweeper) walk(ctx context.Context, gvr schema.GroupVersionResource, p *progress) error {
	s.mu.Lock()
	token := p.next
	p.walking = true
	s.mu.Unlock()
	s.Changed()
	for _, selector := range unstamped {
		for {
			list, err := s.Metadata.Resource(gvr).List(ctx, metav1.ListOptions{LabelSelector: selector, Limit: pageSize, Continue: token})
			if token != "" && (apierrors.IsResourceExpired(err) || apierrors.IsGone(err) || apierrors.IsBadRequest(err)) {
				token = "" // expired: start again, which is short
				continue
			}
			if err != nil {
				return explain(gvr, err)
			}
			items := s.mine(list.Items)
			stamped, err := s.stamp(ctx, gvr, items)
			token = list.Continue
			s.mu.Lock()
			p.seen += int64(len(items))
			p.stamped += stamped
			p.next = token
			s.mu.Unlock()
			s.Changed()
			if err != nil {
				return explain(gvr, err)
			}
			if token == "" {
				break
			}
		}
	}
	return nil
}

// mine omits objects that are being deleted, are the mesh's own, or are excluded.
func (s *Sweeper) mine(items []metav1.PartialObjectMetadata) []metav1.PartialObjectMetadata {
	return slices.DeleteFunc(items, func(o metav1.PartialObjectMetadata) bool {
		return o.Namespace == s.Skip || o.DeletionTimestamp != nil || !s.Settings().StampsIn(o.Namespace)
	})
}

// stamp labels a page. It continues after an object that cannot be labelled, unless the manager
// may label none.
func (s *Sweeper) stamp(ctx context.Context, gvr schema.GroupVersionResource, items []metav1.PartialObjectMetadata) (int64, error) {
	var (
		mu      sync.Mutex
		stamped int64
		failed  error
	)
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(workers)
	for _, o := range items {
		g.Go(func() error {
			if err := s.Limiter.Wait(ctx); err != nil {
				return err
			}
			patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"labels": Of(o.Namespace)}})
			if err != nil {
				return err
			}
			_, err = s.Metadata.Resource(gvr).Namespace(o.Namespace).Patch(ctx, o.Name, types.MergePatchType, patch, metav1.PatchOptions{FieldManager: "ctrlmesh-manager"})
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err == nil:
				stamped++
				metrics.StampedObjects.WithLabelValues("sweep").Inc()
			case apierrors.IsNotFound(err):
			case apierrors.IsForbidden(err) && isRBAC(err):
				return err
			default:
				failed = fmt.Errorf("%s/%s: %w", o.Namespace, o.Name, err)
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return stamped, err
	}
	return stamped, failed
}

// isRBAC reports whether RBAC refused a request. An admission plugin refuses single objects.
func isRBAC(err error) bool { return strings.Contains(err.Error(), "cannot patch resource") }

// errForbidden means that the manager lacks an RBAC permission for a resource.
var errForbidden = errors.New("the manager may not list and patch it")

func explain(gvr schema.GroupVersionResource, err error) error {
	if apierrors.IsForbidden(err) && (isRBAC(err) || strings.Contains(err.Error(), "cannot list resource")) {
		return errForbidden
	}
	return fmt.Errorf("%s: %w", gvr.GroupResource(), err)
}

// Allow describes a missing permission, and the commands that grant it. verbs is "list" or
// "list,patch".
func Allow(verbs string, resources []string) string {
	name := "ctrlmesh-stamp-" + resources[0]
	return fmt.Sprintf("the manager may not %[5]s %[1]s: kubectl create clusterrole %[2]s --verb=%[6]s --resource=%[3]s && kubectl label clusterrole %[2]s %[4]s=true",
		strings.Join(resources, ", "), name, strings.Join(resources, ","), AggregateLabel, strings.ReplaceAll(verbs, ",", " and "), verbs)
}

// Status returns the progress of the resources of a configuration; nil if it lists none.
func (s *Sweeper) Status(c *v1alpha1.ShardingConfig) *v1alpha1.StampingStatus {
	groups := Listed(c)
	if len(groups) == 0 {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	was := s.resumed[c.UID]
	out := &v1alpha1.StampingStatus{Seen: was.Seen, Stamped: was.Stamped}
	if s.served == nil {
		// Nothing is known yet: the status of the last leader applies.
		return was.DeepCopy()
	}
	found, missing := s.resolve(groups)
	out.Done = true
	problems := s.excluded(c)
	var forbidden []string
	for _, gvr := range found {
		gr := gvr.GroupResource()
		p := s.progress[gr]
		if p == nil {
			out.Done = false
			continue
		}
		out.Seen += p.seen
		out.Stamped += p.stamped
		if p.done {
			out.Completed = append(out.Completed, gr.String())
		} else {
			out.Done = false
			if p.walking || p.next != "" {
				out.Resource, out.Continue = gr.String(), p.next
			}
		}
		switch {
		case errors.Is(p.err, errForbidden):
			forbidden = append(forbidden, gr.String())
		case p.err != nil:
			problems = append(problems, p.err.Error())
		}
	}
	if len(forbidden) > 0 {
		problems = append([]string{Allow("list,patch", forbidden)}, problems...)
	}
	for _, m := range missing {
		problems = append(problems, m+" is not a namespaced resource of this cluster that can be labelled (yet)")
	}
	if s.failing != nil && len(missing) > 0 {
		out.Done = false
		problems = append(problems, "not all API groups answer: "+s.failing.Error())
	}
	const most = 3
	if n := len(problems) - most; n > 0 {
		problems = append(problems[:most], fmt.Sprintf("and %d more", n))
	}
	out.Message = strings.Join(problems, "; ")
	return out
}

func (s *Sweeper) log() *slog.Logger { return cmp.Or(s.Log, slog.Default()) }
