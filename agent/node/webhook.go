package node

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"os"
	"slices"

	"github.com/ctrlmesh/ctrlmesh/agent/capture/inbound"
	"github.com/ctrlmesh/ctrlmesh/agent/webhook"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/review"
)

var (
	errByAddress   = errors.New("the pod is captured by address: choose another capture mode")
	errHostNetwork = errors.New("the pod uses the node's network")
)

// reviews is what this agent has of the webhook of a captured pod. It is zero while reviews
// are not routed.
type reviews struct {
	captured *inbound.Pod
	routed   *webhook.Pod
	certDir  string
	port     uint32
	problem  error // why nothing is captured
}

// abandon leaves the webhook to the next agent.
func (r *reviews) abandon() error {
	if r.captured == nil {
		return nil
	}
	r.routed.Stop()
	captured := r.captured
	*r = reviews{}
	return captured.Abandon()
}

// setWebhooks replaces how reviews are routed.
func (e *effects) setWebhooks(w *meshv1.Webhooks) {
	e.keepWebhooks(w)
	if e.phase == serving {
		e.logError(e.Store.SaveWebhooks(w), "failed to save the webhooks for the next start", nil)
	}
	for _, p := range e.pods {
		e.route(p)
		e.setWebhook(p)
	}
}

func (e *effects) keepWebhooks(w *meshv1.Webhooks) {
	e.webhooks = map[string]*meshv1.Webhook{}
	for _, one := range w.GetWebhooks() {
		for uid := range one.GetPods() {
			e.webhooks[uid] = one
		}
	}
}

// route gives the proxy of a pod its routes, also while it only drains.
func (e *effects) route(p *pod) {
	m := e.webhooks[p.info.UID]
	if p.redirection.proxied == nil {
		return
	}
	var routes *review.Routes
	if m != nil {
		var err error
		if routes, err = review.Compile(m, m.GetPods()[p.info.UID]); err != nil {
			e.logError(err, "failed to route the reviews of a pod: the last routes apply", p)
			return
		}
	}
	p.redirection.proxied.Reviews().SetRoutes(routes)
}

// setWebhook captures the connections to a pod's webhook, or ends that. While another agent
// serves, they are its own.
func (e *effects) setWebhook(p *pod) {
	m := e.webhooks[p.info.UID]
	w := &p.redirection.webhook
	switch {
	case p.redirection.captured == nil || e.phase != serving:
		return
	case m == nil || p.deleted():
		e.endWebhook(p)
		return
	case w.captured != nil && w.certDir == m.GetCertDir() && w.port == m.GetPort():
		return
	}
	files := p.inherited.inbound
	p.inherited.inbound = nil
	if w.captured != nil {
		e.endWebhook(p)
	}
	if err := e.captureWebhook(p, m, files); err != nil {
		for _, f := range files {
			_ = f.Close()
		}
		if w.problem == nil || w.problem.Error() != err.Error() {
			e.logError(err, "failed to route the reviews of a pod", p)
		}
		w.problem = err
	}
}

// captureWebhook captures the connections to a webhook. It uses the listeners of a
// predecessor if there are any.
func (e *effects) captureWebhook(p *pod, m *meshv1.Webhook, files []*os.File) error {
	switch {
	case m.GetProblem() != "":
		return errors.New(m.GetProblem())
	case e.Inbound == nil:
		return fmt.Errorf("this node cannot steer connections: %w", e.NoInbound)
	case p.byAddress():
		return errByAddress
	case p.info.HostNetwork:
		return errHostNetwork
	case m.GetPort() == 0 || m.GetPort() > math.MaxUint16:
		return fmt.Errorf("invalid port %d", m.GetPort())
	}
	var ports []uint16
	if len(files) > 0 {
		ports = []uint16{uint16(m.GetPort())}
	}
	uid := p.info.UID
	captured, err := e.Inbound.Capture(inbound.Request{UID: uid, NetNS: p.redirection.captured.NetNS(), Ports: ports, Files: files})
	if err != nil {
		return err
	}
	e.route(p)
	p.redirection.webhook = reviews{captured: captured, certDir: m.GetCertDir(), port: m.GetPort()}
	p.redirection.webhook.routed = webhook.Start(webhook.Config{
		Captured: captured, CertDir: m.GetCertDir(), Port: uint16(m.GetPort()), Steered: len(files) > 0,
		Addresses: func(ctx context.Context) []netip.Addr { return e.addresses(ctx, uid) },
		Processes: func() ([]int, error) {
			found, err := e.Locator.Find(map[string]bool{uid: true})
			return found[uid].PIDs, err
		},
		Owns:   func(pid int) (bool, error) { return e.Locator.Owns(uid, pid) },
		Files:  p.reading,
		Server: p.redirection.proxied.Reviews(), Log: e.Logger.With("pod", p.info.String()),
	})
	return nil
}

// addresses returns the addresses that a pod has now, which may be more than when it started.
// It waits for the loop.
func (c *core) addresses(ctx context.Context, uid string) []netip.Addr {
	var found []netip.Addr
	err := c.run(ctx, func() {
		if p := c.pods[uid]; p != nil {
			found = slices.DeleteFunc(slices.Clone(p.info.Addresses), func(a netip.Addr) bool { return !a.IsValid() })
		}
	})
	if err != nil {
		return nil // the loop may still write found
	}
	return found
}

// endWebhook leaves the webhook of a pod to the application.
func (e *effects) endWebhook(p *pod) {
	for _, f := range p.inherited.inbound {
		_ = f.Close()
	}
	p.inherited.inbound = nil
	w := p.redirection.webhook
	p.redirection.webhook = reviews{}
	if w.captured == nil {
		return
	}
	w.routed.Stop()
	e.logError(w.captured.Release(), "failed to release the webhook of a pod", p)
}

// webhookProblem returns why the reviews of a pod are not routed; "" if they are, or are not
// to be.
func (c *core) webhookProblem(p *pod) string {
	err := p.redirection.webhook.problem
	if p.redirection.webhook.routed != nil {
		err = p.redirection.webhook.routed.Problem()
	}
	if err == nil || c.webhooks[p.info.UID] == nil {
		return ""
	}
	return err.Error()
}
