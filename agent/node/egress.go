package node

import (
	"math"
	"slices"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

// setEgress redirects a pod's connections to other hosts as the rules in force require.
// Connections that still arrive without such rules pass. While another agent serves, the
// redirection is its own.
func (n *Node) setEgress(p *pod) {
	if p.captured == nil || n.phase != serving {
		return
	}
	rules := p.applied.Rules
	if rules == nil {
		return // the rules are unknown: the redirection stays as the predecessor left it
	}
	ports := portsOf(rules)
	listeners, err := p.captured.SetEgress(ports)
	if err != nil {
		p.egressServed = p.egressServed && len(ports) > 0 // without ports the listeners are closed all the same
		if why := err.Error(); p.egressProblem != why {
			p.egressProblem = why
			n.Logger.Error("redirecting other connections of a pod", "pod", p.info.String(), "error", err)
		}
		return
	}
	p.egressProblem = ""
	if len(listeners) > 0 && !p.egressServed {
		for _, l := range listeners {
			go n.accept(p.proxied.ServeEgress, l, "serving other connections of a pod", p.info.String())
		}
	}
	p.egressServed = len(listeners) > 0
}

// retryEgress retries what failed.
func (n *Node) retryEgress() {
	for _, p := range n.pods {
		if p.egressProblem != "" {
			n.setEgress(p)
		}
	}
}

// egressPorts returns the ports that may have to be redirected once the pod's policy is
// applied: those of its rules, and of the last valid ones, which stay in force if its rules
// are invalid.
func (p *pod) egressPorts() []uint16 {
	rules := p.knownRules()
	if p.policy != nil && !p.deleted() {
		rules = p.policy.GetTraffic()
	}
	return portsOf(rules, p.rules)
}

// portsOf returns the ports that any of these rules redirects.
func portsOf(rules ...*meshv1.Traffic) []uint16 {
	var ports []uint16
	for _, t := range rules {
		for _, port := range t.GetEgress().GetPorts() {
			if port > 0 && port <= math.MaxUint16 && !slices.Contains(ports, uint16(port)) {
				ports = append(ports, uint16(port))
			}
		}
	}
	return ports
}
