package status

import (
	"crypto/sha256"
	"encoding/hex"
	"slices"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
)

// PolicyInput is an object that several CircuitBreakers stand for.
type PolicyInput struct {
	Namespace  string
	Generation int64
	Before     v1alpha1.CircuitBreakerStatus
	Breakers   []compile.Breaker
	// Problem says why the object has no effect; nil if it has.
	Problem *compile.Problem
	// Problems are the parts that have no effect.
	Problems []*compile.Problem
	TrafficInput
}

// OfPolicy computes the status of an object that several CircuitBreakers stand for. The object
// is in force in a pod if each of them is that selects the pod.
func OfPolicy(p PolicyInput) v1alpha1.CircuitBreakerStatus {
	hash := sha256.New()
	for _, b := range p.Breakers {
		hash.Write([]byte(b.Hash))
	}
	all := compile.Ruling{Hash: hex.EncodeToString(hash.Sum(nil)[:8]), Problem: p.Problem, Problems: p.Problems}
	known := byPod(p.Before.TargetStatus)
	var targets []target
	for _, b := range p.Breakers {
		b.Hash = all.Hash
		if b.Problem != nil {
			all.Problems = append(all.Problems, b.Problem)
		}
		all.Problems = append(all.Problems, b.Problems...)
		for _, selected := range b.Targets {
			targets = merge(targets, p.breakerTarget(b, selected, known, nil))
		}
	}
	return p.breakerStatus(p.Before, p.Generation, all.Hash, targets, nil, ready(all, p.Namespace, targets, "in force"))
}

// merge adds what one CircuitBreaker does in a pod to what others do there.
func merge(targets []target, t target) []target {
	i := slices.IndexFunc(targets, func(o target) bool { return o.PodName == t.PodName })
	if i < 0 {
		return append(targets, t)
	}
	o := &targets[i]
	o.LimitingSnapshots = append(o.LimitingSnapshots, t.LimitingSnapshots...)
	o.inForce = o.inForce && t.inForce
	if o.why == "" {
		o.why, o.reason = t.why, t.reason
	}
	if o.Message == "" {
		o.Message = t.Message
	}
	if t.ConfigHash == "" {
		o.ConfigHash = ""
	}
	return targets
}
