package status

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/internal/readiness"
	"github.com/ctrlmesh/ctrlmesh/manager/locks"
	"github.com/ctrlmesh/ctrlmesh/manager/metrics"
	"github.com/ctrlmesh/ctrlmesh/manager/push"
)

// LeaderlessAfter is how long a shard must have had no leader before the status reports it:
// twice the usual duration of a lease.
const LeaderlessAfter = 30 * time.Second

// Serves reports whether a pod is ready, captured, and has a policy in force.
func Serves(pod *corev1.Pod, o push.Observation) bool {
	return o.Capture != "" && o.Version != "" && readiness.Of(pod)
}

// Led is the input for the leader of a shard that should act.
type Led struct {
	// Name of the shard, with the namespace if it is hand-written; Config is the configuration
	// that it belongs to.
	Name   string
	Config types.NamespacedName
	// Locks are those that its members lead under; none without leader election.
	Locks []*meshv1.Lock
	// Listed are the operator's locks as the status lists them.
	Listed  []v1alpha1.LockStatus
	Members []LedMember
}

// LedMember is a pod of a shard.
type LedMember struct {
	Name string
	// Account is its ServiceAccount.
	Account string
	Ready   bool
	push.Observation
}

// Leader is the leader of a shard.
type Leader struct {
	// Pod holds the shard's locks. It lists several pods if each holds some of the locks. It is
	// empty if none holds a lock, or the operator has none.
	Pod string
	// Ready members.
	Ready int
	// Working reports whether some member does the shard's work, as far as is known.
	Working bool
	// Elects reports whether the shard elects its leader by locks, or waits for a lock that the
	// mesh does not manage.
	Elects bool
	// Missing is why no member has worked for LeaderlessAfter; nil if one has.
	Missing *locks.Obstacle
}

// Leads reports whether a ready member holds the locks of the shard.
func (l Leader) Leads() bool { return l.Pod != "" && l.Working }

// contends reports whether the ready members of a shard wait for a lock that the mesh does
// not manage.
func (l Leader) contends() bool {
	return l.Missing != nil && l.Missing.Reason != v1alpha1.ReasonNoReadyMember
}

// FindLeaders returns the leaders of shards that should act, and since when the others have had
// none. before is the latter of the last call. holder returns the current holder of a lock; empty
// if it has none.
func FindLeaders(shards []Led, before map[string]time.Time, holder func(namespace, name string) string, now time.Time) (leaders map[string]Leader, since map[string]time.Time) {
	leaders, since = map[string]Leader{}, map[string]time.Time{}
	for _, s := range shards {
		leader, unled := s.leader()
		if !leader.Working {
			since[s.Name] = collect.Since(before, s.Name, now)
			if now.Sub(since[s.Name]) >= LeaderlessAfter {
				leader.Missing = s.missing(leader, unled, holder)
			}
		}
		leader.Elects = len(s.Locks) > 0 || leader.contends()
		leaders[s.Name] = leader
	}
	return leaders, since
}

// LeaderMetrics are the metrics of leaders. Its zero value is ready to use.
type LeaderMetrics struct {
	counted map[metrics.Shard]bool // shards with metrics
}

// Set sets the metrics of shards that should act, and removes those of shards that no longer act.
func (m *LeaderMetrics) Set(leaders map[metrics.Shard]Leader) {
	for s, leader := range leaders {
		s.CountLeader(leader.Elects, leader.Leads(), leader.Ready)
	}
	for s := range m.counted {
		if _, ok := leaders[s]; !ok {
			s.ForgetLeader()
		}
	}
	m.counted = map[metrics.Shard]bool{}
	for s := range leaders {
		m.counted[s] = true
	}
}

// leader returns the holders of the shard's locks. unled is a lock without a holder.
func (s Led) leader() (out Leader, unled *meshv1.Lock) {
	var pods []string
	out.Ready = collect.Count(s.Members, func(m LedMember) bool { return m.Ready })
	for _, l := range s.Locks {
		i := slices.IndexFunc(s.Members, func(m LedMember) bool {
			return m.Ready && (slices.Contains(m.HeldLocks, l.GetNamespace()+"/"+l.GetName()) || len(s.Locks) == 1 && m.LockHolder)
		})
		switch {
		case i < 0 && unled == nil:
			unled = l
		case i >= 0 && !slices.Contains(pods, s.Members[i].Name):
			pods = append(pods, s.Members[i].Name)
		}
	}
	out.Pod = strings.Join(pods, ",")
	out.Working = out.Ready > 0 && unled == nil && (len(s.Locks) > 0 || s.unmanaged() == nil)
	return out, unled
}

// unmanaged returns a lock that all ready members wait for and the mesh does not manage.
func (s Led) unmanaged() *push.ObservedLock {
	seen := map[string]int{}
	locks := map[string]push.ObservedLock{}
	ready := 0
	for _, m := range s.Members {
		if !m.Ready {
			continue
		}
		ready++
		for _, o := range m.ObservedLocks {
			if o.Holder != "" && !strings.HasPrefix(o.Holder, v1alpha1.LockIdentityPrefix) {
				seen[o.Namespace+"/"+o.Name]++
				locks[o.Namespace+"/"+o.Name] = o
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(locks)) {
		if seen[name] >= ready {
			return new(locks[name])
		}
	}
	return nil
}

// missing returns what a shard's pods wait for.
func (s Led) missing(leader Leader, unled *meshv1.Lock, holder func(namespace, name string) string) *locks.Obstacle {
	if leader.Ready == 0 {
		return &locks.Obstacle{Reason: v1alpha1.ReasonNoReadyMember, Message: fmt.Sprintf("shard %s has no ready member, so its keys have no working owner%s", s.Name, s.refused(unled))}
	}
	l := s.unmanaged()
	if l != nil && slices.ContainsFunc(s.Listed, func(k v1alpha1.LockStatus) bool { return k.Namespace == l.Namespace && k.Name == l.Name }) {
		return &locks.Obstacle{Reason: v1alpha1.ReasonHeldOutside,
			Message: fmt.Sprintf("shard %s has no leader: its pods wait for lock %s/%s, which %q holds outside the mesh; the mesh acquires it when that lease ends", s.Name, l.Namespace, l.Name, l.Holder)}
	}
	if l != nil {
		return &locks.Obstacle{Reason: v1alpha1.ReasonUnknownLock,
			Message: fmt.Sprintf("shard %s has no leader: its pods wait for lock %s/%s, which %q holds and the mesh does not manage; name it in spec.controller.locks", s.Name, l.Namespace, l.Name, l.Holder)}
	}
	is := cmp.Or(holder(unled.GetNamespace(), unled.GetUpstreamName()), "nobody")
	return &locks.Obstacle{Reason: v1alpha1.ReasonNoLeader,
		Message: fmt.Sprintf("shard %s has no leader: none of its %d ready pods holds lock %s/%s, which %s holds%s",
			s.Name, leader.Ready, unled.GetNamespace(), unled.GetUpstreamName(), is, s.refused(unled))}
}

// MissingLeaders joins the obstacles of shards without a leader, sorted by shard; nil if all have
// one.
func MissingLeaders(leaders map[string]Leader) *locks.Obstacle {
	var out *locks.Obstacle
	more := 0
	for i, name := range slices.Sorted(maps.Keys(leaders)) {
		switch missing := leaders[name].Missing; {
		case missing == nil:
		case out == nil:
			out = new(*missing)
		case i < maxNamed:
			out.Message += "; " + missing.Message
		default:
			more++
		}
	}
	if more > 0 {
		out.Message += fmt.Sprintf("; and %d more shards", more)
	}
	return out
}
