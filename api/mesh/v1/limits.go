package meshv1

import "time"

const (
	// DefaultRequestTimeout is the apiserver's default for --request-timeout.
	DefaultRequestTimeout = time.Minute
	// LostWrite is how long a write may still take effect after the apiserver has given it
	// up, at its request timeout or because it ended the connection. What it had handed to
	// etcd by then is committed, or not, within etcd's own bound on a request.
	LostWrite = 5 * time.Second
)

// MaxLocks bounds the locks of one operator. Some have one for each of their controllers, and
// for each of several buckets.
const MaxLocks = 64

// MaxIdentity bounds the identity of a lock's holder in a report, in bytes.
const MaxIdentity = 512

// MaxActivity bounds the resources that an agent reports as written or watched by one pod: as
// many that the policy divides, and as many others.
const MaxActivity = 16

// MaxMethods bounds the resources whose methods an agent reports for one pod.
const MaxMethods = 64

const (
	// MaxLockRefusals bounds the refusals of locks in the report about one pod.
	MaxLockRefusals = 8
	// MaxRefusalMessage bounds the apiserver's message about each of them, in bytes.
	MaxRefusalMessage = 256
)

const (
	// MaxPolicyBytes bounds the policy of one pod, and the webhooks of one node, encoded. The
	// manager replaces a larger policy by a refusal of that pod, and the largest webhooks by
	// their problem.
	MaxPolicyBytes = 8 << 20
	// MaxMessageBytes bounds a message from the manager to an agent: a policy, and what
	// is around it.
	MaxMessageBytes = 16 << 20
	// MaxSmallPolicyBytes bounds the policies that agents without AbilityLargePolicies
	// receive.
	MaxSmallPolicyBytes = 4<<20 - 1<<10
)

// Bounds on the regular expressions of traffic rules, so that they take an agent some tens of
// milliseconds for one request at most, whatever its host and path are.
const (
	// MaxMatchSteps bounds the instructions that all expressions of a pod run together, for a
	// host and a path of the maximum length.
	MaxMatchSteps = 1 << 20
	// MaxMatchedHost is the maximum length of a host name in bytes.
	MaxMatchedHost = 253
	// MaxMatchedPath bounds a path in bytes where an expression for paths applies. It is
	// shared by the targets of a request if there are several.
	MaxMatchedPath = 2048
)

// Bounds of a Usage. Those of namespaces and objects are of all resources together.
const (
	MaxUsageResources  = 64
	MaxUsageNamespaces = 128
	MaxUsageObjects    = 64
	MaxUsageCross      = 32
)

// Bounds of a ShadowReport.
const (
	MaxShadowDifferences = 16
	MaxShadowFields      = 8
	MaxFieldPath         = 253 // bytes
)

// Abilities of agents, in their Hello.
const (
	// AbilityTraffic is that of agents that know PodPolicy.traffic.
	AbilityTraffic = "traffic"
	// AbilityLargePolicies is that of agents that receive messages of MaxMessageBytes.
	AbilityLargePolicies = "large-policies"
	// AbilityStandby is that of agents that know Sharding.locks, standby and dry_run. An
	// agent that ignored them would let a pod lead beside others, and write.
	AbilityStandby = "standby"
	// AbilityClusterScoped is that of agents that know Sharding.cluster_scoped_owner. An agent
	// that ignored it would let every shard write objects in no namespace.
	AbilityClusterScoped = "cluster-scoped"
	// AbilityUserAgents is that of agents that know Sharding.user_agent, user_agent_prefix and
	// denied_user_agents. An agent that ignored the last would serve all clients.
	AbilityUserAgents = "user-agents"
	// AbilityRequestScope is that of agents that know ResourceMatch.scope. An agent that
	// ignored it would apply rules to other requests, so that a rule that allows them could
	// take the place of one that limits them.
	AbilityRequestScope = "request-scope"
	// AbilityClusters is that of agents that know PodPolicy.cluster_paths, KEY_CLUSTER and
	// ResourceMatch.clusters. An agent that ignored them would let every shard write in every
	// member cluster.
	AbilityClusters = "clusters"
	// AbilityMemberNamespaces is that of agents that divide member clusters by namespace, if
	// KEY_NAMESPACE comes with PodPolicy.cluster_paths. An agent that did not would let every
	// shard write in all their namespaces.
	AbilityMemberNamespaces = "member-namespaces"
	// AbilityShadow is that of agents that know Sharding.shadow. An agent that ignored it would
	// pass the writes of a shadow on.
	AbilityShadow = "shadow"
)
