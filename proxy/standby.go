package proxy

import (
	"fmt"

	"github.com/ctrlmesh/ctrlmesh/proxy/status"
)

// standbyRetry is the Retry-After of what a member in standby is refused, in seconds.
// client-go repeats the request itself, so that the first one after the standby passes.
const standbyRetry = 1

// standbyStage refuses the writes of a member that owns nothing yet, whatever its
// isolation.
type standbyStage struct {
	border
	divided bool // else only namespaces are fenced
}

// standbyStage returns nil where the policy is no standby or the request is no write
// that is divided.
func (p *policy) standbyStage(key planKey) *standbyStage {
	if !p.standby || !key.writes() && !key.connects() {
		return nil
	}
	b, ok := p.border(key)
	if !ok {
		return nil
	}
	_, divided := p.limits.Scope(key.group, key.resource)
	return &standbyStage{border: b, divided: divided}
}

func (s *standbyStage) apply(x *exchange) *outcome {
	if !s.refuses(x.req.info.Namespace) {
		return nil
	}
	return x.policy.inStandby()
}

// refuses reports whether a write in a namespace is refused. Of divided resources all
// are: objects in no namespace, which every shard may write, are not this pod's yet.
func (s *standbyStage) refuses(namespace string) bool { return s.divided || s.foreign(namespace) }

// inStandby refuses a write until the pod is given keys.
func (p *policy) inStandby() *outcome {
	why := p.message.GetSharding().GetStandbyReason()
	if why == "" {
		why = fmt.Sprintf("ShardingConfig %s/%s: its shard owns nothing yet", p.pod.info.Namespace, p.shard)
	}
	return refusalBy("standby", status.Unavailable(standbyRetry, "pod %s is in standby and may not write yet: %s", p.pod.id, why))
}
