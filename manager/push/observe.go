package push

import (
	"cmp"
	"slices"
	"time"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
)

// observation is what one agent said of a pod.
type observation struct {
	reported     bool
	capture      string
	message      string
	version      string
	nacked, nack string
	serial       int64
	barred       bool
	withheld     bool
	holder       bool
	held         []string
	locks        []ObservedLock
	dead         []Holder
	methods      map[string]string
	rules        map[string]*meshv1.RuleState
	faults       map[string]*meshv1.FaultState
	egress       string
	traffic      string
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
	// Serial is the highest serial of a policy that the agents said the pod has had.
	Serial int64
	// Barred: the pod was refused since, and the agents apply no policy with that serial.
	Barred bool
	// Nacked is the version that the agent could not apply, and Nack why. Withheld: it was
	// not sent, because the agent is too old.
	Nacked, Nack string
	Withheld     bool
	// LockHolder: the pod holds its shard's lock.
	LockHolder bool
	// HeldLocks are the locks of its policy that the pod holds, as namespace/name, sorted.
	HeldLocks []string
	// ObservedLocks are other leader-election locks that the pod writes or polls, sorted.
	ObservedLocks []ObservedLock
	// Dead are the pod's last writes of its locks, once the processes that wrote them have ended and
	// nothing of theirs is under way. Sorted by lock.
	Dead []Holder
	// Methods are how lists and watches of divided resources, as resource.group, are
	// narrowed in fact. It is not to be written to.
	Methods map[string]string
	// Rules and Faults are what the rules of the pod's policy have done, by their keys.
	// They are not to be written to.
	Rules  map[string]*meshv1.RuleState
	Faults map[string]*meshv1.FaultState
	// EgressMessage says why connections to other hosts are not redirected.
	EgressMessage string
	// TrafficMessage says why the rules of the policy are not in force though the rest
	// of it is, and what holds instead.
	TrafficMessage string
	// NoTraffic: the agent, or one of two, is too old to know of such rules.
	NoTraffic bool
}

// ObservedLock is a leader-election lock seen in a pod's requests.
type ObservedLock struct {
	// Namespace and Name of the lock; Resource is leases, configmaps or endpoints.
	Namespace, Name, Resource string
	// Holder by the last answer that the pod got; empty if it is not known.
	Holder string
	// Written: the pod tried to write a leader-election record. False: it only reads.
	Written bool
}

// Holder is what was written into a lock.
type Holder struct {
	// Namespace and Name of the lock, by the operator's own name.
	Namespace, Name string
	// Identity is a text of the pod's own.
	Identity string
	// Version is the Lease's resourceVersion, as written.
	Version string
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
	streams := n.streams
	if len(streams) == 0 && n.last != nil {
		streams = []*stream{n.last}
	}
	// While an agent is replaced there are two. The newest that captures the pod
	// knows best; else the newest that told of it.
	var best observation
	for _, st := range streams {
		out.NoTraffic = out.NoTraffic || !st.can.traffic
		if o, ok := st.seen[uid]; ok && (o.capture != "" || best.capture == "") {
			best = o
		}
	}
	out.Known = best.reported
	out.Capture, out.Message, out.Version = best.capture, best.message, best.version
	out.Nacked, out.Nack, out.Withheld, out.LockHolder = best.nacked, best.nack, best.withheld, best.holder
	out.HeldLocks, out.ObservedLocks = best.held, best.locks
	out.Dead, out.Methods = best.dead, best.methods
	out.Rules, out.Faults, out.EgressMessage = best.rules, best.faults, best.egress
	out.TrafficMessage = best.traffic
	// Until the older has drained it serves too, and the newer may before it reports:
	// a policy is in force when it is in both. What died a moment ago may have left
	// writes behind.
	wanted := n.policies[uid].GetVersion()
	for _, st := range slices.Concat(streams, n.lost) {
		o, said := st.seen[uid]
		out.addSerial(o)
		if !said || o.capture == "" && o.reported {
			continue
		}
		out.TrafficMessage = cmp.Or(out.TrafficMessage, o.traffic)
		if o.version != wanted {
			out.Version = o.version
			if o.nacked == wanted {
				out.Nacked, out.Nack, out.Withheld = o.nacked, o.nack, o.withheld
			}
		}
	}
	return out
}

// addSerial adds what an agent said of the serials that the pod has had.
func (out *Observation) addSerial(o observation) {
	serial, _ := compile.Serial(o.version)
	serial = min(serial, maxSerial)
	if o.serial > out.Serial || o.serial == out.Serial && o.barred {
		out.Barred = o.barred
	}
	out.Serial = max(out.Serial, o.serial)
	if serial > out.Serial {
		out.Serial, out.Barred = serial, false
	}
}

// Unheard returns those of some nodes of which no agent has connected, as far as is known.
func (s *Server) Unheard(nodes []string) (out []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, name := range nodes {
		if n := s.nodes[name]; n == nil || len(n.streams) == 0 && n.left.IsZero() {
			out = append(out, name)
		}
	}
	return out
}

// HostNetwork tells how many of the connected agents' nodes can tell pods under
// hostNetwork apart, and why others cannot, by node.
func (s *Server) HostNetwork() (able int, not map[string]string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	not = map[string]string{}
	for name, n := range s.nodes {
		if len(n.streams) == 0 {
			continue
		}
		if c := n.streams[len(n.streams)-1].can; c.hostNetwork {
			able++
		} else {
			not[name] = c.reason
		}
	}
	return able, not
}

// Captures counts the nodes of connected agents by the way of capture that works
// best there.
func (s *Server) Captures() map[string]int {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := map[string]int{}
	for _, n := range s.nodes {
		if len(n.streams) == 0 {
			continue
		}
		if c := n.streams[len(n.streams)-1].can.capture; c != "" {
			out[c]++
		}
	}
	return out
}
