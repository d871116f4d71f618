package compile

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"

	"google.golang.org/protobuf/proto"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

// versioner computes the versions of policies. It caches the digests of shardings that
// several pods share. These may be large, and must not change while the versioner is in use.
type versioner map[*meshv1.Sharding][]byte

// finish sets the version of a policy. traffic is the digest of its Traffic, if it has one.
func (s versioner) finish(node string, p *meshv1.PodPolicy, traffic []byte) Policy {
	var err error
	if p.Version, err = s.version(p, traffic); err != nil {
		// A policy that cannot be encoded must not block the policies of other pods.
		p = &meshv1.PodPolicy{
			Uid: p.Uid, Namespace: p.Namespace, Name: p.Name, Version: "unsound" + hex.EncodeToString(traffic),
			Refuse: "the policy of this pod cannot be encoded", Traffic: p.Traffic,
		}
	}
	return Policy{Node: node, PodPolicy: p}
}

// version returns the hash of a policy's content, prefixed with its serial if it has one.
func (s versioner) version(p *meshv1.PodPolicy, traffic []byte) (string, error) {
	sharding, rules, required := p.Sharding, p.Traffic, p.RequiredSerial
	p.Sharding, p.Traffic, p.RequiredSerial = nil, nil, 0
	content, err := digest(p)
	p.Sharding, p.Traffic, p.RequiredSerial = sharding, rules, required
	if err != nil {
		return "", err
	}
	if sharding != nil {
		if s[sharding] == nil {
			if s[sharding], err = digest(sharding); err != nil {
				return "", err
			}
		}
		content = append(content, s[sharding]...)
	}
	if rules != nil {
		content = append(append(content, "traffic"...), traffic...)
	}
	sum := sha256.Sum256(content)
	hash := hex.EncodeToString(sum[:8])
	if p.GetSerial() == 0 {
		return hash, nil
	}
	return fmt.Sprintf("%d-%s", p.GetSerial(), hash), nil
}

// digest returns the hash of a message. The message must have no maps, so that its
// deterministic encoding is the same in every process of one build. If another build
// encodes it differently, the policy is pushed once more at worst.
func digest(m proto.Message) ([]byte, error) {
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("encoding a policy: %w", err)
	}
	sum := sha256.Sum256(b)
	return sum[:], nil
}

// Serial returns the serial at the start of the version of a member's policy. ok is false
// for the versions of other pods' policies.
func Serial(version string) (serial int64, ok bool) {
	number, _, ok := strings.Cut(version, "-")
	if !ok {
		return 0, false
	}
	serial, err := strconv.ParseInt(number, 10, 64)
	return serial, err == nil
}

// Workload returns the name of the workload that owns a pod. For a pod of a Deployment,
// whose owner is a ReplicaSet, it is the name of the ReplicaSet without the hash of the
// pod template. The apiserver does not check the names of owners, so they are bounded to the
// length of a name, and invalid UTF-8 is replaced.
func Workload(pod *corev1.Pod) string {
	owner := metav1.GetControllerOf(pod)
	if owner == nil {
		return pod.Name
	}
	name := strings.ToValidUTF8(owner.Name[:min(len(owner.Name), validation.DNS1123SubdomainMaxLength)], "?")
	if hash := pod.Labels["pod-template-hash"]; owner.Kind == "ReplicaSet" && hash != "" {
		return strings.TrimSuffix(name, "-"+hash)
	}
	return name
}

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
