package usage

import (
	"time"

	"k8s.io/apimachinery/pkg/runtime/schema"
)

const (
	// quiet is for how long nothing has changed in a namespace before a write there has another cause.
	quiet = time.Minute
	// soon is how soon a write follows the change that caused it, or an event the pod's own write.
	soon = 5 * time.Second
	// maxChanged bounds the namespaces of causes.
	maxChanged = 1024
)

// causes estimates which writes in a namespace follow from changes in another: nothing has changed there, and
// something else has just now. It errs where much changes everywhere.
type causes struct {
	changed map[string]*changes // by namespace
	all     changes             // of all namespaces
	full    time.Time           // when there was last no room for a namespace
}

// changes are the last change that the pod did not write, and the one before.
type changes struct{ last, before change }

type change struct {
	at time.Time
	of schema.GroupResource
}

func (c *changes) note(one change) { c.last, c.before = one, c.last }

// forget forgets the last change.
func (c *changes) forget() { c.last = c.before }

// note notes a change in a namespace, which is empty for what is in none.
func (c *causes) note(of schema.GroupResource, namespace []byte, now time.Time) {
	c.all.note(change{now, of})
	known := c.changed[string(namespace)]
	if known == nil && !c.room(now) {
		c.full = now
		return
	}
	if known == nil {
		known = &changes{}
		c.changed[string(namespace)] = known
	}
	known.note(change{now, of})
}

// room makes room for another namespace, if there may be one.
func (c *causes) room(now time.Time) bool {
	if c.changed == nil {
		c.changed = map[string]*changes{}
	}
	if len(c.changed) < maxChanged {
		return true
	}
	for namespace, known := range c.changed {
		if now.Sub(known.last.at) >= quiet {
			delete(c.changed, namespace)
		}
	}
	return len(c.changed) < maxChanged
}

// elsewhere returns the resource that changed in another namespace just before a write was sent to this one,
// where nothing had. ok is false if there is none. An event about the write itself may have come already.
func (c *causes) elsewhere(namespace string, sent time.Time) (cause schema.GroupResource, ok bool) {
	here := c.changed[namespace]
	if here != nil && here.last.at.After(sent) {
		if c.all.last == here.last {
			c.all.forget()
		}
		here.forget()
	}
	for _, of := range []string{namespace, ""} { // every shard sees what is in no namespace
		if known := c.changed[of]; known != nil && sent.Sub(known.last.at) < quiet {
			return cause, false
		}
	}
	if sent.Sub(c.all.last.at) > soon || sent.Sub(c.full) < quiet {
		return cause, false
	}
	return c.all.last.of, true
}
