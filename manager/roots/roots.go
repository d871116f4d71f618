// Package roots derives shards from configurations with spec.root, and moves keys between
// them by handovers. It does the I/O for manager/roots/decide, which uses manager/handover and
// manager/layout. A round collects events, steps the state of each root and writes it to
// status.root by compare and swap. Only then does the rest of the manager see the new state.
//
// Only the leader runs rounds, one at a time.
package roots

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"reflect"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/locks"
	"github.com/ctrlmesh/ctrlmesh/manager/metrics"
	"github.com/ctrlmesh/ctrlmesh/manager/origin"
	"github.com/ctrlmesh/ctrlmesh/manager/push"
	"github.com/ctrlmesh/ctrlmesh/manager/query"
	"github.com/ctrlmesh/ctrlmesh/manager/resources"
	"github.com/ctrlmesh/ctrlmesh/manager/roots/decide"
	"github.com/ctrlmesh/ctrlmesh/manager/status"
	"github.com/ctrlmesh/ctrlmesh/manager/weigh"
)

// perRoot bounds the time that a round spends on one root.
const perRoot = 15 * time.Second

// Input is what a round is about. The policies of Compiled must be the last ones that were
// pushed, nil before the first push, and Removed must not be older than they are.
type Input struct {
	Configs  []*v1alpha1.ShardingConfig
	Pods     []*corev1.Pod
	Compiled compile.Result
	// Enacted is by what Configs follow what their shards act by, CompiledBy the same of
	// what was compiled.
	Enacted, CompiledBy *Enacted
	// Namespaces are those that exist.
	Namespaces []string
	// Unknown are the resources that the specs of roots name, by uid, and that are not served.
	Unknown map[types.UID]resources.Unknown
	// Unresolved are the roots, by uid, whose selectors of namespaces cannot be followed, and why.
	Unresolved map[types.UID]error
	// ForbiddenLocks are why members of roots, by uid, may not update the locks of their shards.
	ForbiddenLocks map[types.UID]string
	// Node reports whether a Node object exists.
	Node func(name string) bool
	// RequestTimeout is the apiserver's --request-timeout.
	RequestTimeout time.Duration
	// Removed are pods without a policy that may run on and act.
	Removed []push.Removed
	// Unconnected are the Nodes of which no agent has connected to this manager, while it is
	// Young.
	Unconnected []string
}

// Others are what other controllers know.
type Others struct {
	// Stamping returns the progress of the labels of a configuration's objects.
	Stamping func(*v1alpha1.ShardingConfig) *v1alpha1.StampingStatus
	// MissingBundle returns why the CAs of a namespace cannot be written; empty if they can.
	MissingBundle func(namespace string) string
	// Entry returns what is known of the webhook that puts new pods of a VirtualApp on the mesh.
	Entry func(*v1alpha1.ShardingConfig) decide.Entry
}

// Evaluator evaluates the queries of rollouts' analyses, while no round waits for it.
type Evaluator interface {
	// Set sets the queries of all roots.
	Set([]query.Query)
	// Answers returns the answers to the queries of a root that have been evaluated.
	Answers(root types.UID) map[query.Query]query.Answer
}

// Roots are all configurations with spec.root.
type Roots struct {
	// Client reads and writes past any cache.
	Client client.Client
	// Account is the manager's ServiceAccount.
	Account types.NamespacedName
	// Observe returns what the agent of a node reported about a pod.
	Observe func(node, uid string) push.Observation
	// Locks is what is known of operators' locks.
	Locks    locks.Reader
	Others   Others
	Recorder events.EventRecorder
	Weigher  *weigh.Weigher
	Queries  Evaluator
	// Written is called when the result of States changes, Asked when that of Demands does.
	Written, Asked func()
	Log            *slog.Logger
	// Now is the clock.
	Now func() time.Time

	since   time.Time // of the first round
	roots   map[origin.Name]*runner
	written atomic.Pointer[map[types.UID]known]
	demands atomic.Pointer[[]locks.Demand]
	asked   uint64 // the last number of a demand
}

// known is the part of a root's state that the rest of the manager may use.
type known struct {
	compile.Root
	err error // why the state cannot be read
}

// States returns the states of roots as they are written. ok is false while a root has not
// been read yet, because any policy may depend on it. States omits roots whose state is
// invalid.
func (r *Roots) States(configs []*v1alpha1.ShardingConfig, namespaces []string) (out map[origin.Name]compile.Root, ok bool) {
	written := ptr.Deref(r.written.Load(), nil)
	out = map[origin.Name]compile.Root{}
	for _, c := range configs {
		if c.Spec.Root == nil {
			continue
		}
		k, looked := written[c.UID]
		if !looked {
			return nil, false
		}
		if k.err == nil {
			k.Namespaces = namespaces
			out[origin.Of(c)] = k.Root
		}
	}
	return out, true
}

// Young reports whether this manager became the leader within status.Grace, so that agents
// may not have connected yet.
func (r *Roots) Young() bool { return r.roots == nil || r.Now().Sub(r.since) < status.Grace }

// Round takes the steps that are possible now for each root.
func (r *Roots) Round(ctx context.Context, w Input) error {
	if r.roots == nil {
		r.since, r.roots = r.Now(), map[origin.Name]*runner{}
	}
	configs := map[origin.Name]*v1alpha1.ShardingConfig{}
	var weighed []*v1alpha1.ShardingConfig
	for _, c := range w.Configs {
		if c.Spec.Root != nil {
			configs[origin.Of(c)] = c
			weighed = append(weighed, c)
		}
	}
	r.Weigher.Set(weighed, w.Namespaces)
	for key, rt := range r.roots {
		if c := configs[key]; c == nil || c.UID != rt.uid {
			delete(r.roots, key)
			metrics.ForgetRoot(key.Namespace, key.Name)
		}
	}
	w.Unconnected = collect.Map(w.Unconnected, func(node string) string {
		return fmt.Sprintf("the agent of node %s, which may have pods that the apiserver does not know", node)
	})
	var errs []error
	for _, key := range slices.SortedFunc(maps.Keys(configs), func(a, b origin.Name) int { return strings.Compare(a.String(), b.String()) }) {
		rt := r.roots[key]
		if rt == nil {
			rt = &runner{of: r, uid: configs[key].UID, demand: FirstDemand(configs[key])}
			r.roots[key] = rt
		}
		one, cancel := context.WithTimeout(ctx, perRoot)
		if err := rt.round(one, configs[key], w); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", key, err))
		}
		cancel()
	}
	r.publishDemands()
	r.askQueries()
	return errors.Join(errs...)
}

// askQueries has the queries of all roots evaluated.
func (r *Roots) askQueries() {
	var all []query.Query
	for _, rt := range r.roots {
		all = append(all, rt.queries...)
	}
	r.Queries.Set(all)
}

// store publishes the state of a root.
func (r *Roots) store(uid types.UID, k known) {
	next := map[types.UID]known{uid: k}
	before := ptr.Deref(r.written.Load(), nil)
	for _, rt := range r.roots {
		if was, ok := before[rt.uid]; ok && rt.uid != uid {
			next[rt.uid] = was
		}
	}
	r.written.Store(&next)
}

// Demands returns the demands of roots for locks. It is not ok before the first round.
func (r *Roots) Demands() (demands []locks.Demand, ok bool) {
	known := r.demands.Load()
	return ptr.Deref(known, nil), known != nil
}

// FirstDemand returns the demand of a root that this leader has not decided about: the locks on record
// stay as they are.
func FirstDemand(config *v1alpha1.ShardingConfig) locks.Demand {
	d := locks.Demand{Config: client.ObjectKeyFromObject(config), Mode: locks.Watch}
	for _, l := range config.Status.Locks {
		d.Locks = append(d.Locks, locks.LockOf(types.NamespacedName{Namespace: l.Namespace, Name: l.Name}, config.Status.Locks))
	}
	return d
}

// publishDemands publishes the demands of a round. The locks of roots that could not be
// read stay as they are.
func (r *Roots) publishDemands() {
	out := make([]locks.Demand, 0, len(r.roots))
	for _, rt := range r.roots {
		if rt.object == nil || rt.broken != nil {
			rt.demand.Mode = locks.Watch
		}
		switch {
		case rt.demand.Mode == locks.Release:
			rt.demand.Asked = 0
		case rt.demand.Asked == 0:
			r.asked++
			rt.demand.Asked = r.asked
		}
		out = append(out, rt.demand)
	}
	slices.SortFunc(out, func(a, b locks.Demand) int { return strings.Compare(a.Config.String(), b.Config.String()) })
	if before := r.demands.Swap(&out); before == nil || !reflect.DeepEqual(*before, out) {
		r.Asked()
	}
}

// CorrectEvery is the time between two rounds while Correcting.
const CorrectEvery = decide.CorrectEvery

// Correcting reports whether some root's shards are being balanced, so that the next round
// should follow after CorrectEvery.
func (r *Roots) Correcting() bool {
	return collect.Any(r.roots, func(_ origin.Name, rt *runner) bool { return rt.memory.Correcting() })
}
