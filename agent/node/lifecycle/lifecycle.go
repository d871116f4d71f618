// Package lifecycle is the life of one pod as its agent sees it: states, events, and the
// effects of each transition. It does no I/O. Package node feeds it events and carries out
// the effects.
package lifecycle

// Presence is what is known of a pod's existence, by the best source so far.
type Presence int

const (
	// Expected means that the manager has sent a policy, and nothing else is known of the pod.
	Expected Presence = iota
	// Restored means that an earlier agent knew the pod.
	Restored
	// Announced means that the container runtime has announced the pod.
	Announced
	// Listed means that the API lists the pod.
	Listed
	// Deleted means that the API does not list the pod any more, and its processes run on: it was
	// deleted by force, its label was removed, or the list is stale. Others may own its
	// keys by now, so it is refused everything, whatever its failure policy.
	Deleted
	// Gone means that neither the pod nor a process of it exists. This state is final.
	Gone
)

// Redirect is the agent that the pod's connections are redirected to.
type Redirect int

const (
	// Nobody means that the pod is not captured.
	Nobody Redirect = iota
	// Self means that this agent accepts the pod's connections.
	Self
	// Successor means that another agent accepts the pod's connections. This one ends the requests
	// that are in flight.
	Successor
)

// Proxy is what the proxy of this agent does with the pod's requests.
type Proxy int

const (
	// None means that there is no proxy for the pod.
	None Proxy = iota
	// Waiting means that the proxy has had no policy of the pod yet, and answers 503.
	Waiting
	// Deciding means that the proxy decides by the pod's policy, or by a refusal that replaced it.
	Deciding
)

// State is the state of one pod.
type State struct {
	Presence Presence
	Redirect Redirect
	Proxy    Proxy
	// Assigned is true while the manager has a policy for the pod.
	Assigned bool
}

// Event is something that happened to a pod.
type Event int

const (
	// PolicySet occurs when the manager has sent a policy.
	PolicySet Event = iota
	// PolicyRemoved occurs when the manager has no policy for the pod any more.
	PolicyRemoved
	// PolicyRestored occurs when the agent reads a policy that an earlier agent saved.
	PolicyRestored
	// PolicyApplied occurs when the proxy has taken the pod's policy.
	PolicyApplied
	// Announcement occurs when the container runtime names the pod.
	Announcement
	// Listing occurs when the API lists the pod.
	Listing
	// Absence occurs when the API does not list the pod, and a process of it runs.
	Absence
	// Exit occurs when the API does not list the pod, and no process of it runs.
	Exit
	// Capture occurs when the pod's connections are redirected to this agent, which has made a proxy
	// for them.
	Capture
	// SandboxExit occurs when the captured network namespace was deleted, or is not the pod's any more.
	SandboxExit
	// Takeover occurs when another agent accepts the pod's connections.
	Takeover
	// Stop occurs when this agent stops. The redirection stays, so that nothing goes around the mesh.
	Stop
	// Resumption occurs when this agent goes on, because its successor has failed. Meanwhile it saved
	// nothing and redirected nothing.
	Resumption
)

// Effect is what a transition requires of the agent.
type Effect int

const (
	// ApplyPolicy gives the proxy the policy of the manager.
	ApplyPolicy Effect = iota
	// RefuseDeleted makes the proxy refuse every request, because the pod was deleted.
	RefuseDeleted
	// RefuseUnassigned makes the proxy refuse every request, because the manager has no
	// policy for the pod.
	RefuseUnassigned
	// RedirectEgress redirects connections to other hosts as the rules in force require.
	RedirectEgress
	// Save makes what the next agent needs survive this one: failure policy and policy.
	Save
	// Release ends the capture, and drops listeners that a predecessor offered.
	Release
	// Forget drops the pod and all that is saved of it.
	Forget
	// Discard drops a policy whose pod was never seen.
	Discard
)

// Next returns the state after an event, and the effects in their order. An event that
// cannot happen in a state changes nothing.
func (s State) Next(e Event) (State, []Effect) {
	switch e {
	case PolicySet:
		s.Assigned = true
		return s, s.enforced(Save)
	case PolicyRemoved:
		return s.unassign()
	case PolicyRestored:
		s.Assigned = true
	case PolicyApplied:
		if s.Proxy == Waiting {
			s.Proxy = Deciding
		}
	case Capture:
		if s.Redirect == Nobody && s.Presence != Expected {
			s.Redirect, s.Proxy = Self, Waiting
			return s, s.enforced(Save)
		}
	case SandboxExit:
		if s.Redirect != Successor {
			s.Redirect, s.Proxy = Nobody, None
			return s, []Effect{Release}
		}
	case Stop:
		s.Redirect, s.Proxy = Nobody, None
	case Takeover:
		if s.Redirect == Self {
			s.Redirect = Successor
		}
	case Resumption:
		if s.Presence != Expected {
			return s, []Effect{RedirectEgress, Save}
		}
	default:
		return s.observe(e)
	}
	return s, nil
}

// observe handles the events that say whether the pod exists.
func (s State) observe(e Event) (State, []Effect) {
	switch e {
	case Announcement:
		if s.Presence == Expected || s.Presence == Restored {
			s.Presence = Announced
		}
	case Listing:
		before := s.Presence
		s.Presence = Listed
		if before == Deleted { // the list was stale
			return s, s.enforced(Save)
		}
	case Absence:
		if s.Presence == Restored || s.Presence == Announced || s.Presence == Listed {
			s.Presence = Deleted
			return s, s.enforced(Save)
		}
	case Exit:
		if s.Presence != Expected {
			return State{Presence: Gone}, []Effect{Release, Forget}
		}
	}
	return s, nil
}

func (s State) unassign() (State, []Effect) {
	s.Assigned = false
	if s.Presence == Expected {
		return State{Presence: Gone}, []Effect{Discard}
	}
	return s, s.enforced(Save)
}

// enforced returns what makes the proxy act as the state requires, then more. A pod whose
// proxy waits may get its policy yet, and is not refused.
func (s State) enforced(more ...Effect) []Effect {
	var verdict Effect
	switch {
	case s.Proxy == None:
		return more
	case s.Presence == Deleted:
		verdict = RefuseDeleted
	case s.Assigned:
		verdict = ApplyPolicy
	case s.Proxy == Deciding:
		verdict = RefuseUnassigned
	default:
		return more
	}
	return append([]Effect{verdict}, more...)
}
