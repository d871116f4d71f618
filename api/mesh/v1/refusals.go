package meshv1

// Refusal is why a proxy answered a request itself: the label "reason" of
// ctrlmesh_refusals_total, which docs/metrics.md lists.
type Refusal string

// Refusals before it is known what a request is for.
const (
	RefusedNoPolicy          Refusal = "no_policy"
	RefusedClientCertificate Refusal = "client_certificate"
	RefusedPassthrough       Refusal = "passthrough"
	RefusedContradiction     Refusal = "contradiction"
	RefusedMalformed         Refusal = "malformed"
	RefusedToken             Refusal = "token"
	RefusedUpgrade           Refusal = "upgrade"
)

// Refusals because of the shard.
const (
	RefusedForeign       Refusal = "foreign" // another shard owns the object
	RefusedUnknown       Refusal = "unknown" // the owner cannot be read
	RefusedUserAgent     Refusal = "user_agent"
	RefusedStandby       Refusal = "standby"
	RefusedShadow        Refusal = "shadow"   // it cannot be a dry run
	RefusedCatchUp       Refusal = "catch_up" // the pod's caches may miss the object
	RefusedLock          Refusal = "lock"
	RefusedUnknownLock   Refusal = "unknown_lock"
	RefusedMeshCA        Refusal = "mesh_ca"
	RefusedRelist        Refusal = "relist"
	RefusedNotAcceptable Refusal = "not_acceptable"
)

// Refusals by rules and by bounds of the proxy.
const (
	RefusedLimited Refusal = "limited"
	RefusedBreaker Refusal = "breaker"
	RefusedFault   Refusal = "fault"
	RefusedBound   Refusal = "bound"
	RefusedEnded   Refusal = "ended" // the policy changed, or the proxy ends
	RefusedPanic   Refusal = "panic"
)
