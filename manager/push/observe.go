package push

import (
	"cmp"
	"reflect"
	"slices"
	"time"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
)

// Observation is what the agents of its node reported about one pod.
type Observation struct {
	// Connected reports whether an agent of the pod's node has a stream.
	Connected bool
	// Left is when the last agent disconnected; zero if none has connected.
	Left time.Time
	// Reported: an agent, connected or not, has reported on the pod.
	Reported bool
	// Capture is the mode in which the pod is captured; empty while it is not.
	Capture string
	// Message says why the pod is not captured.
	Message string
	// Version is the version of the policy in force.
	Version string
	// Serial is the highest serial of a policy that the agents said the pod has had.
	Serial int64
	// Barred reports whether the pod was refused since, so that the agents apply no policy
	// with that serial.
	Barred bool
	// Nacked is the version that the agent could not apply, and Nack is the reason. Withheld
	// reports whether the version was not sent, because the agent is too old.
	Nacked, Nack string
	Withheld     bool
	// Methods are the methods that apply to lists and watches of divided resources, by
	// resource.group. The caller must not modify the map.
	Methods map[string]string
	// WebhookMessage says why reviews that arrive at the pod are not routed.
	WebhookMessage string
	// Distrusted reports whether a client of the pod did not trust the mesh's CA lately.
	Distrusted bool
	// Activity is what the pod did to objects lately, by resource. The caller must not modify
	// it.
	Activity []*meshv1.ResourceActivity
	// Outcomes counts how the pod's requests have ended since its agent serves it.
	Outcomes Outcomes
	// Shadow counts how the writes of a shadow have ended; nil for other pods. The caller must
	// not modify it.
	Shadow *Shadow
	// Usage is what the pod requested, if its requests pass unchanged; nil otherwise. The caller must
	// not modify it.
	Usage *meshv1.Usage
	LockReport
	TrafficReport
}

// Outcomes counts how requests ended. LatencyMicros is that of the Answered ones, in total, and
// Writes are those of divided resources.
type Outcomes struct{ Requests, Errors, Conflicts, Answered, LatencyMicros, Writes uint64 }

// LockReport is the part of an Observation that is about leader election.
type LockReport struct {
	// LockHolder reports whether the pod holds its shard's lock.
	LockHolder bool
	// HeldLocks are the locks of its policy that the pod holds, as namespace/name, sorted.
	HeldLocks []string
	// ObservedLocks are other leader-election locks that the pod writes or polls, sorted.
	ObservedLocks []ObservedLock
	// Refusals are errors that the apiserver lastingly answers to the pod's requests for the locks
	// of its policy, sorted by lock.
	Refusals []LockRefusal
	// Dead are the pod's last writes to its locks, once the processes that wrote them have
	// exited and have no writes in flight. They are sorted by lock.
	Dead []Holder
}

// TrafficReport is the part of an Observation that is about traffic rules.
type TrafficReport struct {
	// Rules and Faults are the states and counts of the rules of the pod's policy, by key.
	// The caller must not modify the maps.
	Rules  map[string]*meshv1.RuleState
	Faults map[string]*meshv1.FaultState
	// EgressMessage says why connections to other hosts are not redirected.
	EgressMessage string
	// TrafficMessage says why the traffic rules of the policy are not in force though the
	// rest of it is, and which rules apply instead.
	TrafficMessage string
	// NoTraffic reports whether an agent of the node is too old to support traffic rules.
	NoTraffic bool
}

// ObservedLock is a leader-election lock seen in a pod's requests.
type ObservedLock struct {
	// Namespace and Name of the lock; Resource is leases, configmaps or endpoints.
	Namespace, Name, Resource string
	// Holder is the holder in the last response to the pod; empty if it is unknown.
	Holder string
	// Written reports whether the pod tried to write a leader-election record. If not, it
	// only reads.
	Written bool
}

// LockRefusal is an error that the apiserver answers to a pod's requests for one of its locks.
type LockRefusal struct {
	// Namespace and Name of the lock, by the operator's own name; Resource is leases, configmaps
	// or endpoints.
	Namespace, Name, Resource string
	// Verb of the refused request, and Code of the response.
	Verb string
	Code int
	// Message is the apiserver's; it may be empty.
	Message string
}

// Holder is a leader-election record that was written to a lock.
type Holder struct {
	// Namespace and Name of the lock, by the operator's own name; Resource is leases, configmaps
	// or endpoints.
	Namespace, Name, Resource string
	// Identity is the holder identity, which the pod chooses.
	Identity string
	// Version is the object's resourceVersion, as written.
	Version string
}

// Observe returns what the agents of a node reported about a pod.
func (s *Server) Observe(nodeName, uid string) Observation {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := s.nodes[nodeName]
	if n == nil {
		return Observation{}
	}
	streams := n.present()
	// During a takeover there are two agents. Use the newest that captures the pod, or else
	// the newest that reported on it.
	var out Observation
	noTraffic := false
	for _, st := range streams {
		noTraffic = noTraffic || !st.can.has(meshv1.AbilityTraffic)
		if o, ok := st.seen[uid]; ok && (o.Capture != "" || out.Capture == "") {
			out = o
		}
	}
	out.Connected, out.Left, out.NoTraffic = len(n.streams) > 0, n.left, noTraffic
	out.Serial, out.Barred = 0, false
	// The older agent serves until it has drained, and the newer may serve before it
	// reports. So a policy is in force only once it is in force in both. An agent that died
	// a moment ago may have writes in flight, so it counts too.
	wanted := n.policies[uid].GetVersion()
	for _, of := range [...][]*stream{streams, n.lost} {
		for _, st := range of {
			out.addInForce(st.seen, uid, wanted)
		}
	}
	return out
}

// present are the streams whose reports count: those that are open, or else the last one.
func (n *node) present() []*stream {
	if len(n.streams) == 0 && n.last != nil {
		return []*stream{n.last}
	}
	return n.streams
}

// Exits returns the uids of the pods of which an agent reports dead holders.
func (s *Server) Exits() map[string]bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make(map[string]bool, len(s.exits))
	for uid, name := range s.exits {
		n := s.nodes[name]
		if n != nil && slices.ContainsFunc(n.present(), func(st *stream) bool { return len(st.seen[uid].Dead) > 0 }) {
			out[uid] = true
		} else {
			delete(s.exits, uid)
		}
	}
	return out
}

// addInForce adds what an agent reported about the policy that is in force in the pod, and its serials.
func (out *Observation) addInForce(seen map[string]Observation, uid, wanted string) {
	o, said := seen[uid]
	out.addSerial(o)
	if !said || o.Capture == "" && o.Reported {
		return
	}
	out.TrafficMessage = cmp.Or(out.TrafficMessage, o.TrafficMessage)
	if o.Version != wanted {
		out.Version = o.Version
		if o.Nacked == wanted {
			out.Nacked, out.Nack, out.Withheld = o.Nacked, o.Nack, o.Withheld
		}
	}
}

// addSerial adds what an agent reported about the serials that the pod has had.
func (out *Observation) addSerial(o Observation) {
	serial, _ := compile.Serial(o.Version)
	serial = min(serial, maxSerial)
	if o.Serial > out.Serial || o.Serial == out.Serial && o.Barred {
		out.Barred = o.Barred
	}
	out.Serial = max(out.Serial, o.Serial)
	if serial > out.Serial {
		out.Serial, out.Barred = serial, false
	}
}

// Unconnected returns those of the given nodes from which no agent has connected since the
// manager started, as far as is known.
func (s *Server) Unconnected(nodes []string) []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return collect.Filter(nodes, func(name string) bool {
		n := s.nodes[name]
		return n == nil || len(n.streams) == 0 && n.left.IsZero()
	})
}

// HostNetwork returns on how many nodes with a connected agent pods with hostNetwork can be
// distinguished, and, for each other node, why not.
func (s *Server) HostNetwork() (able int, not map[string]string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	not = map[string]string{}
	for name, c := range s.nodes.abilities() {
		if c.hostNetwork {
			able++
		} else {
			not[name] = c.reason
		}
	}
	return able, not
}

// Captures returns the number of nodes with a connected agent by the best capture mode
// that works there.
func (s *Server) Captures() map[string]int {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := map[string]int{}
	for _, c := range s.nodes.abilities() {
		out[c.capture]++
	}
	delete(out, "")
	return out
}

// keyed is a rule, or the state of one. Agents send states sorted by key.
type keyed interface{ GetKey() string }

// states returns the reported states of a policy's rules by key, without impossible values.
// It omits the states of other rules.
func states[O interface{ GetRules() []R }, R, S keyed](owners []O, said []S, valid func(S) S) map[string]S {
	if len(said) == 0 {
		return nil
	}
	order := func(a, b S) int { return cmp.Compare(a.GetKey(), b.GetKey()) }
	if !slices.IsSortedFunc(said, order) {
		slices.SortStableFunc(said, order)
	}
	out := map[string]S{}
	for _, o := range owners {
		for _, r := range o.GetRules() {
			i, ok := slices.BinarySearchFunc(said, r.GetKey(), func(s S, key string) int { return cmp.Compare(s.GetKey(), key) })
			if ok {
				out[r.GetKey()] = valid(said[i])
			}
		}
	}
	return out
}

// validRule copies the state of a rule, without impossible values.
func validRule(s *meshv1.RuleState) *meshv1.RuleState {
	is := &meshv1.RuleState{Key: s.GetKey(), State: s.GetState(), Passed: s.GetPassed(), Refused: s.GetRefused()}
	if _, known := meshv1.BreakerState_name[int32(is.State)]; !known {
		is.State = meshv1.BreakerState_BREAKER_CLOSED
	}
	latest := time.Now().Add(time.Hour).UnixMilli() // clocks may differ
	if since := s.GetSinceMs(); since > 0 && since < latest {
		is.SinceMs = since
	}
	return is
}

func validFault(s *meshv1.FaultState) *meshv1.FaultState {
	return &meshv1.FaultState{Key: s.GetKey(), Matched: s.GetMatched(), Injected: s.GetInjected()}
}

// equalExceptCounts reports whether two observations differ only in the states and counts of
// rules, and in what the pod did to objects.
func (o Observation) equalExceptCounts(p Observation) bool {
	o.Rules, o.Faults, p.Rules, p.Faults = nil, nil, nil, nil
	o.Activity, p.Activity = nil, nil
	o.Outcomes, p.Outcomes = Outcomes{}, Outcomes{}
	o.Usage, p.Usage = nil, nil
	return reflect.DeepEqual(o, p)
}
