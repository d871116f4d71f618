package node

import (
	"time"

	"google.golang.org/protobuf/proto"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy"
)

// reportChanges tells the manager, and the metrics, what is new.
func (n *Node) reportChanges() {
	if n.phase >= handing {
		return // the successor reports
	}
	counts := map[string]int{}
	for uid, mb := range n.members {
		if mb.pod.UID == "" {
			continue
		}
		r := &meshv1.PodReport{Uid: uid, Message: mb.problem, DeadHolders: mb.dead}
		if mb.captured != nil {
			r.Capture = string(mb.captured.Mode())
			r.Version = n.version(mb)
			r.LockHolder, r.HeldLocks = mb.proxied.LockHolder(), mb.proxied.HeldLocks()
			r.ObservedLocks = observedLocks(mb.proxied.ObservedLocks())
			r.Methods = mb.proxied.Methods()
			r.EgressMessage = mb.egressProblem
			r.TrafficMessage = mb.trafficProblem()
			mb.addRules(r)
		}
		counts[r.GetCapture()]++
		if !proto.Equal(r, mb.reported) {
			mb.reported = r
			n.Manager.Report(r)
			if s := mb.policy.GetSharding(); len(s.GetLocks()) > 0 {
				n.Metrics.SetLockHolder(mb.pod.Namespace, mb.pod.Name, s.GetShard(), r.GetLockHolder())
			}
		}
	}
	n.Metrics.SetPods(counts)
}

func observedLocks(locks []proxy.ObservedLock) (out []*meshv1.ObservedLock) {
	for _, l := range locks {
		out = append(out, &meshv1.ObservedLock{Namespace: l.Namespace, Name: l.Name, Resource: l.Resource, Holder: l.Holder, Written: l.Written})
	}
	return out
}

// rulesInterval is how often counts alone are reported, at most.
const rulesInterval = 2 * time.Second

// addRules says how rules and faults fare, as of a moment ago.
func (mb *member) addRules(r *meshv1.PodReport) {
	if last := mb.reported; last.GetVersion() == r.GetVersion() && last.GetCapture() == r.GetCapture() && time.Since(mb.ruled) < rulesInterval {
		r.Rules, r.Faults = last.GetRules(), last.GetFaults()
		return
	}
	mb.ruled = time.Now()
	r.Rules, r.Faults = mb.proxied.RuleStates(), mb.proxied.FaultStates()
}
