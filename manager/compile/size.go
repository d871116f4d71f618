package compile

import (
	"fmt"

	"google.golang.org/protobuf/proto"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

// sizer computes the sizes of policies. It caches the sizes of shared shardings.
type sizer map[*meshv1.Sharding]int

// exceeded reports whether a policy is larger than an agent accepts.
func (s sizer) exceeded(p *meshv1.PodPolicy) bool {
	size := proto.Size(p.Traffic)
	if p.Sharding != nil {
		shared, known := s[p.Sharding]
		if !known {
			shared = proto.Size(p.Sharding)
			s[p.Sharding] = shared
		}
		size += shared
	}
	return size > meshv1.MaxPolicyBytes-maxRest
}

// maxRest is the room for the rest of a policy in bytes: names, a refusal, lengths.
const maxRest = 64 << 10

// refuseTooLarge replaces the policy of a pod with a refusal. Only omitting rules would
// lift them silently.
func refuseTooLarge(p *meshv1.PodPolicy) {
	p.Refuse = fmt.Sprintf("the policy of pod %s/%s exceeds %d MiB: name fewer namespaces in the selectors of its ShardingConfig, choose another method than Labels, or write fewer rules", p.Namespace, p.Name, meshv1.MaxPolicyBytes>>20)
	p.Sharding, p.Traffic = nil, nil
	p.FailOpen, p.Passthrough = false, false
}
