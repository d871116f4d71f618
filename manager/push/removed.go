package push

import (
	"cmp"
	"maps"
	"slices"
	"time"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/manager/platform"
)

const (
	// maxRemoved bounds the removed pods that are kept per node.
	maxRemoved = 1024
	// maxUID bounds a uid in bytes; no pod has a longer one.
	maxUID = 64
	// removedFor is how long a removed pod is kept while no agent can confirm it: longer
	// than any request lasts.
	removedFor = 2 * platform.MaxRequestTimeout
)

// Removed is a pod without a policy that may run on and act: it had one, or an agent named it,
// and no agent has confirmed since that the pod is refused. The apiserver may have forgotten
// the pod, by a deletion by force or because etcd was restored from a backup.
type Removed struct {
	// Namespace is empty if it is not known.
	Node, Namespace, UID string
	// Left is when the pod was removed or the last agent that had to confirm it
	// disconnected; zero while an agent has yet to confirm it.
	Left time.Time
}

// Over reports whether no request of the pod can take effect any more: it was removed, and the last
// agent that had to confirm that disconnected, longer ago than a request lasts.
func (p Removed) Over(now time.Time, requestTimeout time.Duration) bool {
	return !p.Left.IsZero() && now.Sub(p.Left) >= requestTimeout+meshv1.LostWrite
}

// removed is the state of a removed pod of a node.
type removed struct {
	namespace string
	awaited   map[*stream]bool // agents that have yet to confirm
	left      time.Time        // when the last of them disconnected, or the pod was removed
}

// Removed returns the pods of all nodes that may act without a policy, sorted by node and uid.
func (s *Server) Removed() []Removed {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []Removed
	for name, n := range s.nodes {
		for uid, r := range n.removed {
			p := Removed{Node: name, Namespace: r.namespace, UID: uid}
			if len(r.awaited) == 0 {
				p.Left = r.left
			}
			out = append(out, p)
		}
	}
	slices.SortFunc(out, func(a, b Removed) int {
		return cmp.Or(cmp.Compare(a.Node, b.Node), cmp.Compare(a.UID, b.UID))
	})
	return out
}

// remove records that a pod has no policy, and requests that the node's agents confirm that
// they refuse it.
func (n *node) remove(uid, namespace string) {
	r := n.removed[uid]
	if r == nil {
		if len(n.removed) >= maxRemoved {
			return
		}
		r = &removed{namespace: namespace, awaited: map[*stream]bool{}, left: time.Now()}
		if n.removed == nil {
			n.removed = map[string]*removed{}
		}
		n.removed[uid] = r
	}
	for _, st := range n.streams {
		r.await(uid, st)
	}
}

func (r *removed) await(uid string, st *stream) {
	r.awaited[st] = true
	st.dirty[uid] = struct{}{}
}

// removeUnknown calls remove for the pods of a new stream's hello that have no policy. The
// agent must also confirm the removed pods that others have not confirmed.
func (n *node) removeUnknown(st *stream) {
	for uid := range st.versions {
		if n.policies[uid] == nil && len(uid) <= maxUID {
			n.remove(uid, clip(st.namespaces[uid]))
		}
	}
	st.versions, st.namespaces = nil, nil
	for uid, r := range n.removed {
		r.await(uid, st)
	}
}

// confirm records that an agent refuses a pod without a policy. It reports whether that is
// news.
func (n *node) confirm(uid string, st *stream) (news bool) {
	r := n.removed[uid]
	_, unsent := st.dirty[uid] // the ack answers an earlier message
	if r == nil || !r.awaited[st] || unsent {
		return false
	}
	if delete(r.awaited, st); len(r.awaited) == 0 {
		delete(n.removed, uid)
	}
	return true
}

// unconfirmed records that an agent has disconnected.
func (n *node) unconfirmed(st *stream) {
	for _, r := range n.removed {
		if r.awaited[st] {
			delete(r.awaited, st)
			r.left = time.Now()
		}
	}
}

// forgetRemoved removes the pods that have a policy again, or that no agent confirmed in
// time.
func (n *node) forgetRemoved() {
	maps.DeleteFunc(n.removed, func(uid string, r *removed) bool {
		return n.policies[uid] != nil || len(r.awaited) == 0 && time.Since(r.left) > removedFor
	})
}
