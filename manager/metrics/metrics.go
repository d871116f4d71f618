// Package metrics declares what the manager counts. They are served with
// controller-runtime's own.
package metrics

import (
	"github.com/prometheus/client_golang/prometheus"
	"sigs.k8s.io/controller-runtime/pkg/metrics"
)

var (
	// AgentsConnected is the number of nodes whose agent has a stream.
	AgentsConnected = prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "ctrlmesh_manager_agents_connected",
		Help: "Nodes whose agent is connected to this manager.",
	})
	// Nodes is the number of connected nodes by their best way of capture.
	Nodes = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "ctrlmesh_manager_nodes",
		Help: "Nodes of connected agents, by the way of capture that works best there: ebpf, iptables or address.",
	}, []string{"mode"})
	// HostNetworkNodes is the number of nodes where pods under hostNetwork can be captured.
	HostNetworkNodes = prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "ctrlmesh_manager_host_network_nodes",
		Help: "Nodes of connected agents where pods under hostNetwork can be captured.",
	})
	// Policies is the number of pods by the state of their policy.
	Policies = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "ctrlmesh_policies",
		Help: "Labelled pods by the state of their policy: applied, pending, rejected or unscheduled.",
	}, []string{"state"})
	// UnappliedPods is the number of scheduled pods that do not hold the wanted version.
	UnappliedPods = prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "ctrlmesh_policy_unapplied_pods",
		Help: "Scheduled pods whose agent does not apply the wanted version of their policy.",
	})
	// PolicyNacks counts policies that agents could not apply.
	PolicyNacks = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "ctrlmesh_policy_nacks_total",
		Help: "Policies that an agent answered with an error.",
	})
	// MeshCAExpiry is when the certificate that signs leaves ends.
	MeshCAExpiry = prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "ctrlmesh_mesh_ca_expiry_timestamp_seconds",
		Help: "When the certificate of the mesh CA that signs agents' certificates ends.",
	})
	// MeshCARotation is how far the mesh CA's rotation has come.
	MeshCARotation = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "ctrlmesh_mesh_ca_rotation",
		Help: "1 for the phase that the mesh CA's rotation is in: none, publishing, waiting or retiring.",
	}, []string{"phase"})
	// MeshCARotationPods is the number of pods that hold the rotation up.
	MeshCARotationPods = prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "ctrlmesh_mesh_ca_rotation_waiting_pods",
		Help: "Labelled pods that may not know the next mesh CA, which therefore does not sign yet.",
	})
	// Members is the number of pods of each configuration.
	Members = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "ctrlmesh_members",
		Help: "Pods that a ShardingConfig selects.",
	}, []string{"namespace", "shardingconfig"})
	// BreakersOpen is the number of pods of each CircuitBreaker that are cut off.
	BreakersOpen = podsOf(prometheus.GaugeOpts{
		Name: "ctrlmesh_circuitbreaker_open_pods",
		Help: "Pods in which a breaker of a CircuitBreaker is not closed.",
	}, []string{"namespace", "circuitbreaker"})
	// FaultsInForce is the number of pods of each FaultInjection that are harmed.
	FaultsInForce = podsOf(prometheus.GaugeOpts{
		Name: "ctrlmesh_faultinjection_active_pods",
		Help: "Pods in which a FaultInjection is in force.",
	}, []string{"namespace", "faultinjection"})
	// Handovers counts moves of keys from shard to shard.
	Handovers = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "ctrlmesh_handovers_total",
		Help: "Moves of keys between shards: settled, or blocked for so long that people were told.",
	}, []string{"namespace", "shardingconfig", "result"})
	// HandoverDuration is how long moves took.
	HandoverDuration = prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name:    "ctrlmesh_handover_duration_seconds",
		Help:    "Time that moves of keys took: until released, from then until settled (grant), and in total.",
		Buckets: prometheus.ExponentialBuckets(0.01, 2, 16),
	}, []string{"phase"})
	// HandoversPending is the number of moves under way.
	HandoversPending = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "ctrlmesh_handovers_pending",
		Help: "Moves of keys that are not settled.",
	}, []string{"namespace", "shardingconfig"})
	// ShardNamespaces is the number of namespaces of each derived shard.
	ShardNamespaces = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "ctrlmesh_shard_namespaces",
		Help: "Existing namespaces that a derived shard holds.",
	}, []string{"namespace", "shardingconfig", "shard"})
	// ShardWeight is the number of objects of each derived shard.
	ShardWeight = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "ctrlmesh_shard_weight",
		Help: "Objects of the divided resources that a derived shard holds, as last counted.",
	}, []string{"namespace", "shardingconfig", "shard"})
	// ShardSkew is how far the shards of a root have grown apart.
	ShardSkew = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "ctrlmesh_shard_skew",
		Help: "Weight of the heaviest automatic shard of a root over the mean.",
	}, []string{"namespace", "shardingconfig"})
	// ShardLeader is 1 for a shard that has a leader.
	ShardLeader = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "ctrlmesh_shard_leader",
		Help: "1 if a ready member holds the locks of a shard that is to act, 0 if none does, or if all wait for a lock that the mesh does not manage. No series for operators without leader election.",
	}, []string{"namespace", "shardingconfig", "shard"})
	// ShardReadyMembers is the number of pods that could do a shard's work.
	ShardReadyMembers = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "ctrlmesh_shard_ready_members",
		Help: "Ready members of a shard that is to act.",
	}, []string{"namespace", "shardingconfig", "shard"})
	// NotReady is 1 for each configuration that is not Ready.
	NotReady = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "ctrlmesh_shardingconfig_not_ready",
		Help: "1 for a ShardingConfig that is not Ready, with the reason of that condition. Derived ones are left out.",
	}, []string{"namespace", "shardingconfig", "reason"})
	// LocksFreed counts the locks of shards that were freed of dead holders.
	LocksFreed = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "ctrlmesh_locks_freed_total",
		Help: "Leases of shards that were freed because the process that held them had ended.",
	})
	// StampedObjects counts objects that were given the mesh's labels.
	StampedObjects = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "ctrlmesh_stamped_objects_total",
		Help: "Objects labelled, at admission or by the sweep.",
	}, []string{"by"})
	// AdmissionRefusals counts what the webhooks refused.
	AdmissionRefusals = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "ctrlmesh_admission_refusals_total",
		Help: "Requests that a webhook of the mesh refused.",
	}, []string{"webhook", "reason"})
	// PlatformInvalid is whether the administrator's settings cannot be read.
	PlatformInvalid = prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "ctrlmesh_manager_platform_settings_invalid",
		Help: "1 while ConfigMap ctrlmesh-platform is invalid, so that the former settings apply.",
	})
	// ConnectionsRefused counts connections that the manager closed because of a bound.
	ConnectionsRefused = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "ctrlmesh_manager_connections_refused_total",
		Help: "Connections to a port of the manager (push, webhook, metrics or health) that were closed, and the bound that they exceeded: per-peer or total.",
	}, []string{"port", "bound"})
	// RequestsRefused counts requests that the manager refused because of a bound.
	RequestsRefused = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "ctrlmesh_manager_requests_refused_total",
		Help: "Requests to a port of the manager that were refused, and the bound that they exceeded: size, memory, concurrency or rate.",
	}, []string{"port", "bound"})
)

func init() {
	metrics.Registry.MustRegister(AgentsConnected, Nodes, HostNetworkNodes, Policies, UnappliedPods, PolicyNacks, MeshCAExpiry, MeshCARotation, MeshCARotationPods, Members, BreakersOpen, FaultsInForce, Handovers, HandoverDuration, HandoversPending, ShardNamespaces, ShardWeight, ShardSkew, ShardLeader, ShardReadyMembers, NotReady, LocksFreed, StampedObjects, AdmissionRefusals, PlatformInvalid, ConnectionsRefused, RequestsRefused)
}

// ForgetShard forgets a shard of a root.
func ForgetShard(namespace, config, shard string) {
	ShardNamespaces.DeleteLabelValues(namespace, config, shard)
	ShardWeight.DeleteLabelValues(namespace, config, shard)
	ForgetLeader(namespace, config, shard)
}

// ForgetLeader forgets who leads a shard that is not to act any more.
func ForgetLeader(namespace, config, shard string) {
	ShardLeader.DeleteLabelValues(namespace, config, shard)
	ShardReadyMembers.DeleteLabelValues(namespace, config, shard)
}

// CountLeader counts a shard's leader and ready members.
func CountLeader(namespace, config, shard string, elects, led bool, ready int) {
	ShardReadyMembers.WithLabelValues(namespace, config, shard).Set(float64(ready))
	if !elects {
		ShardLeader.DeleteLabelValues(namespace, config, shard)
		return
	}
	value := 0.0
	if led {
		value = 1
	}
	ShardLeader.WithLabelValues(namespace, config, shard).Set(value)
}

// ForgetRoot forgets a root that is no more.
func ForgetRoot(namespace, config string) {
	of := prometheus.Labels{"namespace": namespace, "shardingconfig": config}
	ShardNamespaces.DeletePartialMatch(of)
	ShardWeight.DeletePartialMatch(of)
	ShardLeader.DeletePartialMatch(of)
	ShardReadyMembers.DeletePartialMatch(of)
	Handovers.DeletePartialMatch(of)
	HandoversPending.Delete(of)
	ShardSkew.Delete(of)
}
