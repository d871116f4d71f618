package node

import (
	"cmp"
	"context"
	"maps"

	"github.com/ctrlmesh/ctrlmesh/agent/control"
	"github.com/ctrlmesh/ctrlmesh/agent/inflight"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

// handler brings the messages of the manager into the loop.
type handler struct {
	ctx context.Context
	*Node
}

// Policies returns the handler of the manager's messages. Its methods fail once ctx ends.
func (n *Node) Policies(ctx context.Context) control.Handler { return handler{ctx, n} }

// SetCluster implements control.Handler.
func (h handler) SetCluster(c *meshv1.Cluster) error {
	return h.do(h.ctx, func() error {
		if err := h.destinations.set(c); err != nil {
			return err
		}
		h.capturer.captureMissing()
		return nil
	})
}

// SetPolicy implements control.Handler.
func (h handler) SetPolicy(policy *meshv1.PodPolicy) (applied control.Applied, err error) {
	err = h.do(h.ctx, func() error {
		settled, err := h.effects.setPolicy(policy)
		applied = h.applied(policy.GetUid(), settled)
		return err
	})
	return applied, err
}

// RemovePolicy implements control.Handler.
func (h handler) RemovePolicy(uid string) (applied control.Applied, err error) {
	err = h.run(h.ctx, func() {
		h.effects.removePolicy(uid)
		settled := h.earlier.Over(uid)
		if p := h.pods[uid]; p != nil {
			settled = inflight.Both(settled, p.settled())
		}
		applied = h.applied(uid, settled)
	})
	return applied, err
}

// applied returns what applies to a pod now.
func (h handler) applied(uid string, settled <-chan struct{}) control.Applied {
	a := control.Applied{Settled: settled}
	if p := h.pods[uid]; p != nil {
		a.TrafficProblem, a.Serial, a.Barred = p.trafficProblem(), p.assignment.serials.Highest, p.assignment.serials.Barred()
	}
	return a
}

// SetWebhooks implements control.Handler.
func (h handler) SetWebhooks(w *meshv1.Webhooks) {
	_ = h.run(h.ctx, func() { h.effects.setWebhooks(w) })
}

// Synced implements control.Handler.
func (h handler) Synced(uids map[string]bool) {
	_ = h.run(h.ctx, func() {
		for uid, p := range h.pods {
			if !uids[uid] && p.assignment.policy != nil {
				h.effects.removePolicy(uid)
			}
		}
	})
}

// Namespaces implements control.Handler.
func (h handler) Namespaces() map[string]string {
	namespaces := map[string]string{}
	_ = h.run(h.ctx, func() {
		maps.Copy(namespaces, h.earlier.Namespaces())
		for uid, p := range h.pods {
			namespaces[uid] = cmp.Or(p.info.Namespace, p.assignment.policy.GetNamespace())
		}
	})
	return namespaces
}

// Versions implements control.Handler.
func (h handler) Versions() map[string]string {
	versions := map[string]string{}
	_ = h.run(h.ctx, func() {
		h.earlier.Each(func(uid string) { versions[uid] = "" }) // deleted pods may have writes in flight
		for uid, p := range h.pods {
			versions[uid] = h.version(p)
		}
	})
	return versions
}
