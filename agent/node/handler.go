package node

import (
	"cmp"
	"context"
	"fmt"
	"maps"

	"google.golang.org/protobuf/proto"

	"github.com/ctrlmesh/ctrlmesh/agent/control"
	"github.com/ctrlmesh/ctrlmesh/agent/inflight"
	"github.com/ctrlmesh/ctrlmesh/agent/node/lifecycle"
	"github.com/ctrlmesh/ctrlmesh/agent/pods"
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
		if err := h.setCluster(c); err != nil {
			return err
		}
		h.captureMissing()
		return nil
	})
}

// SetPolicy implements control.Handler.
func (h handler) SetPolicy(policy *meshv1.PodPolicy) (settled <-chan struct{}, err error) {
	err = h.do(h.ctx, func() error {
		settled, err = h.setPolicy(policy)
		return err
	})
	return settled, err
}

// setPolicy applies and saves a policy. After an error of the proxy the policy before stays.
func (n *Node) setPolicy(policy *meshv1.PodPolicy) (settled <-chan struct{}, err error) {
	uid := policy.GetUid()
	p := n.pods[uid]
	if p == nil { // the manager may know a pod before this agent does
		p = newPod(pods.Pod{}, lifecycle.Expected)
		n.pods[uid] = p
	}
	if err := p.fence.Check(policy); err != nil {
		return nil, err
	}
	policy = p.withRules(policy)
	if before := p.policy; before.GetVersion() != policy.GetVersion() && (before.GetSerial() == 0 || before.GetRefuse() != "") {
		p.confirmed = "" // it may be wanted again, after what came between
	}
	if err := n.assign(uid, p, policy); err != nil {
		return nil, err
	}
	settled = p.settled()
	if policy.GetVersion() != p.confirmed {
		settled = inflight.Both(settled, n.earlier.Over(uid))
	}
	return settled, nil
}

// withRules returns the policy as it applies to the pod. The manager knows no rules of a pod
// that was deleted. If it runs on, its rules stay those that it had.
func (p *pod) withRules(policy *meshv1.PodPolicy) *meshv1.PodPolicy {
	if policy.GetRefuse() == "" || policy.GetTraffic() != nil {
		return policy
	}
	policy = proto.CloneOf(policy)
	if policy.Traffic = new(meshv1.Traffic); policy.GetSerial() > 0 {
		policy.Traffic = p.refusal("").GetTraffic()
	}
	return policy
}

// assign carries out the effects of a new policy. It stops at the first failure.
func (n *Node) assign(uid string, p *pod, policy *meshv1.PodPolicy) error {
	before, state := p.policy, p.state
	p.policy = policy
	var effects []lifecycle.Effect
	p.state, effects = p.state.Next(lifecycle.PolicySet)
	for _, effect := range effects {
		if effect == lifecycle.Save {
			p.fence.Raise(policy)
		}
		err := n.perform(uid, p, effect)
		switch {
		case err == nil:
		case effect == lifecycle.Save:
			return fmt.Errorf("policy %s is in force, but the next agent would not know: %w", policy.GetVersion(), err)
		default:
			p.policy, p.state = before, state
			return err
		}
	}
	return nil
}

// RemovePolicy implements control.Handler.
func (h handler) RemovePolicy(uid string) (settled <-chan struct{}, err error) {
	err = h.do(h.ctx, func() error {
		h.removePolicy(uid)
		settled = h.earlier.Over(uid)
		if p := h.pods[uid]; p != nil {
			settled = inflight.Both(settled, p.settled())
		}
		return nil
	})
	return settled, err
}

func (n *Node) removePolicy(uid string) {
	if p := n.pods[uid]; p != nil {
		p.policy = nil
		n.handle(uid, p, lifecycle.PolicyRemoved)
	}
}

// Synced implements control.Handler.
func (h handler) Synced(uids map[string]bool) {
	_ = h.do(h.ctx, func() error {
		for uid, p := range h.pods {
			if !uids[uid] && p.policy != nil {
				h.removePolicy(uid)
			}
		}
		return nil
	})
}

// TrafficProblem implements control.Handler.
func (h handler) TrafficProblem(uid string) (why string) {
	h.read(uid, func(p *pod) { why = p.trafficProblem() })
	return why
}

// Serial implements control.Handler.
func (h handler) Serial(uid string) (serial uint64, barred bool) {
	h.read(uid, func(p *pod) { serial, barred = p.fence.Highest, p.fence.Barred() })
	return serial, barred
}

// read calls f in the loop, if the pod is known.
func (h handler) read(uid string, f func(*pod)) {
	_ = h.do(h.ctx, func() error {
		if p := h.pods[uid]; p != nil {
			f(p)
		}
		return nil
	})
}

// Namespaces implements control.Handler.
func (h handler) Namespaces() map[string]string {
	namespaces := map[string]string{}
	_ = h.do(h.ctx, func() error {
		maps.Copy(namespaces, h.earlier.Namespaces())
		for uid, p := range h.pods {
			namespaces[uid] = cmp.Or(p.info.Namespace, p.policy.GetNamespace())
		}
		return nil
	})
	return namespaces
}

// Versions implements control.Handler.
func (h handler) Versions() map[string]string {
	versions := map[string]string{}
	_ = h.do(h.ctx, func() error {
		h.earlier.Each(func(uid string) { versions[uid] = "" }) // it is gone, and its writes may go on
		for uid, p := range h.pods {
			versions[uid] = h.version(p)
		}
		return nil
	})
	return versions
}
