package node

import (
	"os"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/ctrlmesh/ctrlmesh/agent/capture"
	"github.com/ctrlmesh/ctrlmesh/agent/inflight"
	"github.com/ctrlmesh/ctrlmesh/agent/journal"
	"github.com/ctrlmesh/ctrlmesh/agent/node/lifecycle"
	"github.com/ctrlmesh/ctrlmesh/agent/pods"
	"github.com/ctrlmesh/ctrlmesh/agent/state"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy"
)

// pod is a labelled pod of this node, or one that the manager names before it is seen.
type pod struct {
	// info is what the best source says; only a policy has come if its UID is empty.
	info  pods.Pod
	state lifecycle.State
	// since is when a sandbox was first looked for.
	since time.Time
	// announced is when the runtime announced the pod; zero once the API has listed it.
	announced time.Time
	// sandbox is the runtime's name of it; "" while that is not certain.
	sandbox string
	// problem is why the pod is not captured.
	problem string
	// reading is held while the files of its webhook's certificate are read.
	reading chan struct{}

	assignment  assignment
	redirection redirection
	inherited   inherited
	reporting   reporting
}

// assignment is the policy of a pod: what the manager wants, what is in force, and what the
// next agent knows of it.
type assignment struct {
	policy  *meshv1.PodPolicy // nil: none
	serials lifecycle.Serials
	// applied is what the proxy decides by.
	applied proxy.Applied
	// rules are the last valid rules of a policy, applied here or by an earlier agent; nil
	// while they are unknown.
	rules *meshv1.Traffic
	// appliedSince is when the policy was applied.
	appliedSince time.Time
	// unsaved is closed when the next agent would know the policy; nil: it would.
	unsaved chan struct{}
	// successor is closed when no write can take effect any more that a failed successor sent
	// under the policy before this one; nil: none can.
	successor <-chan struct{}
	// confirmed is the version that was acked before a takeover. If it comes again, nothing
	// of the other agent need be awaited.
	confirmed string

	// The caches of the pod's clients are filled by cachedBy, unless fresh: then this agent
	// has seen the pod start, and they are empty.
	cachedBy state.Saved
	fresh    bool
}

// redirection is what this agent has of a captured pod. It is zero while the pod is not
// captured. After a takeover, captured is nil and the proxy ends requests in flight.
type redirection struct {
	captured *capture.Pod
	proxied  *proxy.Pod
	journal  *journal.Pod  // of proxied
	netns    uint64        // inode of the captured network namespace
	process  *pods.Process // one in it; nil: none was found
	cgroup   uint64        // of a pod under hostNetwork
	failOpen bool          // as captured knows it

	// last is closed when the writes of the last capture have ended; nil: they have.
	last <-chan struct{}

	egressServed  bool   // its connections to other hosts are served
	egressProblem string // why they are not redirected as the rules require

	webhook reviews
}

// inherited is what the predecessor offered, until the pod is captured.
type inherited struct {
	files   *capture.Files
	inbound []*os.File // of files, until the webhook is routed
	counts  []byte     // of its rules
}

// reporting is the state of the reports about a pod.
type reporting struct {
	// exited are the last writes of the pod's locks whose writers have exited.
	exited   []*meshv1.DeadHolder
	state    reading
	parts    [len(parts)]reading
	reported bool // to the manager, as it was read last
	routed   bool // all its reviews, by the last report
	measured bool // whether they are routed
}

func newPod(info pods.Pod, presence lifecycle.Presence) *pod {
	return &pod{info: info, state: lifecycle.State{Presence: presence}, since: time.Now(), reading: make(chan struct{}, 1)}
}

// decided reports whether the proxy has had a policy of the pod.
func (p *pod) decided() bool { return p.state.Proxy == lifecycle.Deciding }

// deleted reports whether the pod was deleted and runs on.
func (p *pod) deleted() bool { return p.state.Presence == lifecycle.Deleted }

// byAddress reports whether the pod is captured in mode address.
func (p *pod) byAddress() bool {
	return p.redirection.captured != nil && p.redirection.captured.Mode() == capture.Address
}

// failsOpen reports whether the pod's connections go direct while no agent runs.
func (p *pod) failsOpen() bool { return p.assignment.policy.GetFailOpen() && !p.deleted() }

// saved notes whether the next agent would know what is in force.
func (p *pod) saved(yes bool) {
	switch {
	case yes && p.assignment.unsaved != nil:
		close(p.assignment.unsaved)
		p.assignment.unsaved = nil
	case !yes && p.assignment.unsaved == nil:
		p.assignment.unsaved = make(chan struct{})
	}
}

// settled returns a channel that is closed, or nil, when no write that earlier policies
// allowed here can take effect, and the next agent knows the policy in force.
func (p *pod) settled() <-chan struct{} {
	return inflight.Both(p.assignment.applied.Settled, p.assignment.unsaved)
}

// trafficProblem returns why the rules of the policy are not applied, and which are instead.
func (p *pod) trafficProblem() string {
	if p.decided() && p.assignment.applied.Problem != nil {
		return p.assignment.applied.Problem.Error()
	}
	return ""
}

// Reasons for which every request of a pod is refused.
const (
	refusedDeleted    = "this pod was deleted, or has ended, or left the mesh, and runs on"
	refusedUnassigned = "the mesh has no policy for this pod any more"
	refusedExited     = "the pod has ended"
)

// knownRules returns the rules that apply to a pod without a policy of its own.
func (p *pod) knownRules() *meshv1.Traffic {
	if !p.decided() && p.assignment.policy != nil {
		return p.assignment.policy.GetTraffic()
	}
	return p.assignment.rules
}

// refusal returns a policy that refuses every request. It has the version of the pod's
// policy, because no policy forbids to refuse. Connections to other hosts keep the rules that
// they had: without rules all of them would pass. The pod has no share of a limit any more,
// because other pods may have it by now.
func (p *pod) refusal(reason string) *meshv1.PodPolicy {
	rules := proto.CloneOf(p.knownRules())
	for _, b := range rules.GetBreakers() {
		for _, r := range b.GetRules() {
			if r.GetShare() != nil {
				r.Share = &meshv1.Share{}
			}
		}
	}
	return &meshv1.PodPolicy{
		Uid: p.info.UID, Namespace: p.info.Namespace, Name: p.info.Name, Version: p.assignment.policy.GetVersion(), Refuse: reason,
		Traffic: rules,
	}
}
