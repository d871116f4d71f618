package agent

import (
	"time"

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

// afterAgent is closed when nothing takes effect any more that another agent let
// through. Nobody knows what it had under way, but that the apiserver has lost its
// connections by the time that drained is closed; nil: by now.
func afterAgent(drained <-chan struct{}) <-chan struct{} {
	over := make(chan struct{})
	go func() {
		if drained != nil {
			<-drained
		}
		time.Sleep(proxy.LostWrite)
		close(over)
	}()
	return over
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
func (m *mesh) version(mb *member) string {
	p := mb.policy
	switch {
	case mb.unsaved != nil:
		return ""
	case !done(m.earlier[mb.pod.UID]) && (p.GetSerial() > 0 || p.GetRefuse() != ""):
		return mb.confirmed // else nothing is handed over by it
	case mb.proxied != nil:
		return mb.proxied.Version()
	}
	return p.GetVersion()
}
