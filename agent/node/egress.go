package node

import (
	"errors"
	"math"
	"net"
	"slices"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

// setEgress redirects a pod's connections to other hosts as the rules in force require.
// Connections that still arrive when no rule requires it pass. While another agent serves,
// that agent sets the redirection.
func (e *effects) setEgress(p *pod) {
	if p.redirection.captured == nil || e.phase != serving {
		return
	}
	rules := p.assignment.applied.Rules
	if rules == nil {
		return // the rules are unknown: the redirection stays as the predecessor left it
	}
	ports := portsOf(rules)
	listeners, err := p.redirection.captured.SetEgress(ports)
	if err != nil {
		p.redirection.egressServed = p.redirection.egressServed && len(ports) > 0 // without ports the listeners are closed all the same
		if why := err.Error(); p.redirection.egressProblem != why {
			p.redirection.egressProblem = why
			e.logError(err, "failed to redirect other connections of a pod", p)
		}
		return
	}
	p.redirection.egressProblem = ""
	if len(listeners) > 0 && !p.redirection.egressServed {
		for _, l := range listeners {
			go e.accept(p.redirection.proxied.ServeEgress, l, p.info.String())
		}
	}
	p.redirection.egressServed = len(listeners) > 0
}

// accept serves a listener of a pod until it is closed.
func (e *effects) accept(serve func(net.Listener) error, l net.Listener, pod string) {
	if err := serve(l); err != nil && !errors.Is(err, net.ErrClosed) {
		e.Logger.Error("failed to serve a pod", "pod", pod, "error", err)
	}
}

// egressPorts returns the ports that may have to be redirected once the pod's policy is
// applied: those of its rules, and of the last valid ones, which stay in force if its rules
// are invalid.
func (p *pod) egressPorts() []uint16 {
	rules := p.knownRules()
	if p.assignment.policy != nil && !p.deleted() {
		rules = p.assignment.policy.GetTraffic()
	}
	return portsOf(rules, p.assignment.rules)
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
