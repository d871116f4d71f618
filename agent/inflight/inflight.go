// Package inflight knows which writes of agents before this one may still take effect.
package inflight

import (
	"log/slog"
	"maps"
	"time"

	"github.com/ctrlmesh/ctrlmesh/agent/journal"
	"github.com/ctrlmesh/ctrlmesh/agent/takeover"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/writes"
)

// Earlier are the writes of earlier proxies: those of other agents, and those of this agent
// for sandboxes that were deleted. Pods are named by uid. It is not safe for concurrent use.
type Earlier struct {
	// Predecessor is the takeover socket of the agent before this one, Own that of this one.
	Predecessor, Own takeover.ID
	// UnknownUntil is when writes of pods that no earlier agent knew have ended.
	UnknownUntil time.Time

	journal    *journal.Journal
	logger     *slog.Logger
	over       map[string]<-chan struct{} // closed when the writes have ended
	namespaces map[string]string          // of pods in over that were deleted
}

// New returns Earlier without writes. The journal is that of this agent.
func New(j *journal.Journal, logger *slog.Logger) *Earlier {
	return &Earlier{journal: j, logger: logger, over: map[string]<-chan struct{}{}, namespaces: map[string]string{}}
}

// Add adds writes of a pod that have ended when over is closed, or nil.
func (e *Earlier) Add(uid string, over <-chan struct{}) {
	if over = Both(e.over[uid], over); over != nil {
		e.over[uid] = over
	}
}

// Over returns a channel that is closed, or nil, when the writes of a pod have ended.
func (e *Earlier) Over(uid string) <-chan struct{} { return e.over[uid] }

// Ended reports whether the writes of a pod have ended.
func (e *Earlier) Ended(uid string) bool { return Closed(e.over[uid]) }

// Deleted keeps the namespace of a deleted pod until its writes have ended.
func (e *Earlier) Deleted(uid, namespace string) {
	if !e.Ended(uid) {
		e.namespaces[uid] = namespace
	}
}

// Namespaces returns the namespaces of the deleted pods whose writes have not ended.
func (e *Earlier) Namespaces() map[string]string { return maps.Clone(e.namespaces) }

// Each calls f for each pod whose writes may not have ended.
func (e *Earlier) Each(f func(uid string)) {
	for uid := range e.over {
		f(uid)
	}
}

// Tidy forgets writes that have ended.
func (e *Earlier) Tidy() {
	maps.DeleteFunc(e.over, func(_ string, over <-chan struct{}) bool { return Closed(over) })
	maps.DeleteFunc(e.namespaces, func(uid, _ string) bool { return e.over[uid] == nil })
}

// AddPredecessors adds the writes of the agents before this one, which started at the given
// time. policies has all pods of the node; the policy may be nil. offered has what the
// predecessor offered, which sends nothing any more once drained is closed; nil: it died.
//
// The journals of these agents show the writes. Without journals every pod may have writes
// in flight. After a crash so may every pod that fails open: its requests passed no agent.
func (e *Earlier) AddPredecessors(policies map[string]*meshv1.PodPolicy, offered []takeover.Pod, drained <-chan struct{}, started time.Time) {
	complete := e.read(e.Predecessor, "failed to read what earlier agents have in flight: handovers wait for all pods")
	for _, p := range offered {
		complete = complete && p.Journaled
	}
	crashed := drained == nil
	for uid, policy := range policies {
		if !complete || crashed && policy.GetFailOpen() {
			e.addUnknown(uid, policy, drained)
		}
	}
	e.journal.Serving(e.Own)
	e.UnknownUntil = started.Add(takeover.MaxExit + meshv1.LostWrite)
	if crashed {
		e.UnknownUntil = started.Add(writes.Unseen(nil))
	}
	e.logger.Info("looked for writes in flight", "complete", complete, "pods", len(e.over))
}

// AddSuccessor adds the writes of a successor that failed. It may have served pods for a
// moment, by the policies that were saved.
func (e *Earlier) AddSuccessor(policies map[string]*meshv1.PodPolicy) {
	if !e.read(e.Own, "failed to read what the successor has in flight: handovers wait for all pods") {
		for uid, policy := range policies {
			e.addUnknown(uid, policy, nil)
		}
	}
	e.journal.Serving(e.Own)
}

// read adds what journals of other agents have in flight. It reports whether they are
// complete since the agent whose socket is last. A failure is logged with the message.
func (e *Earlier) read(last takeover.ID, failure string) (complete bool) {
	found, complete, err := e.journal.Earlier(last)
	if err != nil {
		e.logger.Error(failure, "error", err)
	}
	for _, p := range found {
		e.Add(p.UID, p.Over)
	}
	return complete
}

// addUnknown adds writes of which nothing is known but that none is sent once drained is
// closed, or nil. It records them for the agents after this one.
func (e *Earlier) addUnknown(uid string, policy *meshv1.PodPolicy, drained <-chan struct{}) {
	unseen := writes.Unseen(policy)
	record := e.journal.Pod(uid)
	record.Unseen(unseen + takeover.MaxExit) // if this agent dies before the other
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
	e.Add(uid, over)
}
