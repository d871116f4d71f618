package node

import (
	"slices"
	"time"

	"github.com/ctrlmesh/ctrlmesh/agent/takeover"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy"
)

// earlier are the proxies that served pods before those that do now: what they let
// through may go on. By pod uid; closed when it is over.
type earlier map[string]<-chan struct{}

// add notes one more proxy of a pod.
func (e earlier) add(uid string, over <-chan struct{}) {
	if over = both(e[uid], over); over != nil {
		e[uid] = over
	}
}

// tidy forgets what is over.
func (e earlier) tidy() {
	for uid, over := range e {
		if both(over, nil) == nil {
			delete(e, uid)
		}
	}
}

// addUnknown notes that another agent may have let writes of a pod through of which
// nothing is known but that no more leave once drained is closed; nil: by now. It is
// written to the journal for the agents after this one.
func (n *Node) addUnknown(uid string, drained <-chan struct{}) {
	unseen := proxy.UnseenWrite(n.members[uid].policy)
	record := n.Journal.Pod(uid)
	record.Unseen(unseen + endWithin) // if this agent dies before the other
	record.Begin()
	over := make(chan struct{})
	lose := func() {
		record.Lose(unseen)
		record.Close()
		time.AfterFunc(unseen, func() { close(over) })
	}
	if drained == nil {
		lose()
	} else {
		go func() {
			<-drained
			lose()
		}()
	}
	n.earlier.add(uid, over)
}

// addEarlier notes what agents before this one may have in flight, once the members
// are known. Their journals show it. Without them any pod may have writes in flight,
// and after a crash any pod that fails open, because its requests passed no agent.
func (n *Node) addEarlier(handed []takeover.Pod, drained <-chan struct{}) {
	found, complete, err := n.Journal.Earlier(n.lastSocket)
	if err != nil {
		n.Logger.Error("failed to read what earlier agents have in flight: handovers wait for all pods", "error", err)
	}
	for _, p := range found {
		n.earlier.add(p.UID, p.Over)
	}
	complete = complete && !slices.ContainsFunc(handed, func(p takeover.Pod) bool { return !p.Journaled })
	crashed := drained == nil
	for uid, mb := range n.members {
		if !complete || crashed && mb.policy.GetFailOpen() {
			n.addUnknown(uid, drained)
		}
	}
	n.Journal.Serving(n.socket)
	n.strangers = n.started.Add(endWithin + meshv1.LostWrite)
	if crashed {
		n.strangers = n.started.Add(proxy.UnseenWrite(nil))
	}
	n.Logger.Info("looked for writes in flight", "complete", complete, "pods", len(n.earlier))
}

// addSuccessor notes what a successor that failed may have in flight: it may have served
// pods for a moment, under the policies that were saved. What came meanwhile is confirmed
// after that.
func (n *Node) addSuccessor() {
	found, complete, err := n.Journal.Earlier(n.socket)
	if err != nil {
		n.Logger.Error("failed to read what the successor has in flight: handovers wait for all pods", "error", err)
	}
	for _, p := range found {
		n.earlier.add(p.UID, p.Over)
	}
	for uid, mb := range n.members {
		if !complete {
			n.addUnknown(uid, nil)
		}
		if mb.unsaved != nil {
			mb.successor = n.earlier[uid]
		}
	}
	n.Journal.Serving(n.socket)
}

// both is closed when both are, and nil if they are already, or nil.
func both(a, b <-chan struct{}) <-chan struct{} {
	switch {
	case done(a) && done(b):
		return nil
	case done(a):
		return b
	case done(b):
		return a
	}
	c := make(chan struct{})
	go func() {
		<-a
		<-b
		close(c)
	}()
	return c
}

func done(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return c == nil
	}
}

// version is that of the policy which all is held to that is done for a pod, by
// this agent or by one before it, and that the next one will know; "" for none.
func (n *Node) version(mb *member) string {
	p := mb.policy
	switch {
	case mb.unsaved != nil:
		return ""
	case !done(n.earlier[mb.pod.UID]) && (p.GetSerial() > 0 || p.GetRefuse() != ""):
		return mb.confirmed // else nothing is handed over by it
	case mb.proxied != nil:
		return mb.proxied.Version()
	}
	return p.GetVersion()
}
