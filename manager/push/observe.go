package push

import "time"

// observation is what one agent said of a pod.
type observation struct {
	reported     bool
	capture      string
	message      string
	version      string
	nacked, nack string
	holder       bool
}

// Observation is what is known of one pod from its node's agent.
type Observation struct {
	// Connected: an agent of the pod's node has a stream.
	Connected bool
	// Left is when the last agent went; zero if none has been here.
	Left time.Time
	// Known: an agent, here or gone, has reported on the pod.
	Known bool
	// Capture is how its traffic reaches the proxy; empty while it does not.
	Capture string
	// Message says why not.
	Message string
	// Version of the policy in force.
	Version string
	// Nacked is the version that the agent could not apply, and Nack why.
	Nacked, Nack string
	// LockHolder: the pod holds its shard's lock.
	LockHolder bool
}

// Observe tells what is known of a pod on a node.
func (s *Server) Observe(nodeName, uid string) Observation {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := s.nodes[nodeName]
	if n == nil {
		return Observation{}
	}
	out := Observation{Connected: len(n.streams) > 0, Left: n.left}
	// While an agent is replaced there are two. The one that captures the pod
	// knows best; else the newer.
	var best observation
	streams := n.streams
	if len(streams) == 0 && n.last != nil {
		streams = []*stream{n.last}
	}
	for _, st := range streams {
		if o, ok := st.seen[uid]; ok && (o.capture != "" || best.capture == "") {
			best = o
		}
	}
	out.Known = best.reported
	out.Capture, out.Message, out.Version = best.capture, best.message, best.version
	out.Nacked, out.Nack, out.LockHolder = best.nacked, best.nack, best.holder
	return out
}
