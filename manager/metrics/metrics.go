// Package metrics declares the metrics of the manager. They are served with
// controller-runtime's own.
package metrics

import (
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
)

var (
	// AgentsConnected is the number of nodes whose agent has a stream.
	AgentsConnected = gauge("ctrlmesh_manager_agents_connected", "Nodes whose agent is connected to this manager.")
	// Nodes is the number of connected nodes by their best capture mode.
	Nodes = gauges("ctrlmesh_manager_nodes", "Nodes with a connected agent, by the best capture mode that works there: ebpf, iptables or address.", "mode")
	// HostNetworkNodes is the number of nodes where pods with hostNetwork can be captured.
	HostNetworkNodes = gauge("ctrlmesh_manager_host_network_nodes", "Nodes with a connected agent where pods with hostNetwork can be captured.")
	// Policies is the number of pods by the state of their policy.
	Policies = gauges("ctrlmesh_policies", "Labelled pods by the state of their policy: applied, pending, rejected or unscheduled.", "state")
	// UnappliedPods is the number of scheduled pods in which another version applies.
	UnappliedPods = gauge("ctrlmesh_policy_unapplied_pods", "Scheduled pods whose agent does not apply the wanted version of their policy.")
	// PolicyNacks counts policies that agents could not apply.
	PolicyNacks = counter("ctrlmesh_policy_nacks_total", "Policies that an agent answered with an error.")
	// MeshCAExpiry is when the certificate that signs leaves expires.
	MeshCAExpiry = gauge("ctrlmesh_mesh_ca_expiry_timestamp_seconds", "When the certificate of the mesh CA that signs agents' certificates expires.")
	// MeshCARotation is the phase of the mesh CA's rotation.
	MeshCARotation = gauges("ctrlmesh_mesh_ca_rotation", "1 for the phase that the mesh CA's rotation is in: none, publishing, waiting or retiring.", "phase")
	// MeshCARotationPods is the number of pods that the rotation waits for.
	MeshCARotationPods = gauge("ctrlmesh_mesh_ca_rotation_waiting_pods", "Labelled pods that may not know the next mesh CA, which therefore does not sign yet.")
	// CompileSeconds is how long the last compilation worked on each configuration.
	CompileSeconds = byName[float64](gauges("ctrlmesh_manager_compile_seconds", "How long the last compilation of policies worked on a ShardingConfig, its namespaces and its pods. Derived ones are left out.", "namespace", "shardingconfig"))
	// Members is the number of pods of each configuration.
	Members = gauges("ctrlmesh_members", "Pods that a ShardingConfig selects.", "namespace", "shardingconfig")
	// BreakersOpen is the number of pods of each CircuitBreaker whose requests it refuses.
	BreakersOpen = byName[int32](gauges("ctrlmesh_circuitbreaker_open_pods", "Pods in which a breaker of a CircuitBreaker is not closed.", "namespace", "circuitbreaker"))
	// FaultsInForce is the number of pods of each FaultInjection into which it injects faults.
	FaultsInForce = byName[int32](gauges("ctrlmesh_faultinjection_active_pods", "Pods in which a FaultInjection is in force.", "namespace", "faultinjection"))
	// Handovers counts moves of keys from shard to shard.
	Handovers = counters("ctrlmesh_handovers_total", "Moves of keys between shards: settled, or blocked for so long that an Event was emitted.", "namespace", "shardingconfig", "result")
	// HandoverDuration is how long moves took.
	HandoverDuration = register.NewHistogramVec(prometheus.HistogramOpts{
		Name:    "ctrlmesh_handover_duration_seconds",
		Help:    "Duration of moves of keys: until released (release), from then until settled (grant), and in total (total).",
		Buckets: prometheus.ExponentialBuckets(0.01, 2, 16),
	}, []string{"phase"})
	// HandoversPending is the number of moves that are not settled.
	HandoversPending = gauges("ctrlmesh_handovers_pending", "Moves of keys that are not settled.", "namespace", "shardingconfig")
	// ShardNamespaces is the number of namespaces of each derived shard.
	ShardNamespaces = gauges("ctrlmesh_shard_namespaces", "Existing namespaces that a derived shard owns.", "namespace", "shardingconfig", "shard")
	// ShardWeight is the number of objects of each derived shard.
	ShardWeight = gauges("ctrlmesh_shard_weight", "Objects of the divided resources that a derived shard owns, as last counted.", "namespace", "shardingconfig", "shard")
	// ShardSkew is the skew of the shards of a root.
	ShardSkew = gauges("ctrlmesh_shard_skew", "Weight of the heaviest automatic shard of a root, divided by the mean weight.", "namespace", "shardingconfig")
	// UndividedResources is the number of resources that several shards write.
	UndividedResources = gauges("ctrlmesh_undivided_resources", "Resources that several shards of a root write although it does not divide them. evidence writes: in the same namespaces, or to the same objects; watches: while they watch all namespaces.", "namespace", "shardingconfig", "evidence")
	// ForeignWrites is the number of writes that passed.
	ForeignWrites = gauges("ctrlmesh_foreign_writes", "Writes of divided resources to objects of other shards of a root that were not refused, within the last hour at most.", "namespace", "shardingconfig")
	// OutdatedPods is the number of pods of each derived shard that a rollout is to replace.
	OutdatedPods = gauges("ctrlmesh_shard_outdated_pods", "Pods of a derived shard that the rollout of a root is to replace.", "namespace", "shardingconfig", "shard")
	// RolloutHalted is 1 for a root whose rollout has halted.
	RolloutHalted = gauges("ctrlmesh_rollout_halted", "1 if the pods of a shard do not serve under the revision that a root rolls out, 0 if they do.", "namespace", "shardingconfig")
	// Rollbacks counts the templates that were restored.
	Rollbacks = counters("ctrlmesh_rollbacks_total", "Times that the manager restored the template of a StatefulSet after its rollout had halted.", "namespace", "shardingconfig")
	// RolloutQueries counts the evaluations of queries.
	RolloutQueries = counters("ctrlmesh_rollout_queries_total", "Evaluations of the queries of rollouts' analyses: answered by Prometheus, with a result or without, or failed.", "result")
	// IdleShards is the number of shards that never write.
	IdleShards = gauges("ctrlmesh_idle_shards", "Shards of a root that have objects and have written nothing for 10 minutes, while others do.", "namespace", "shardingconfig")
	// ShardLeader is 1 for a shard that has a leader.
	ShardLeader = gauges("ctrlmesh_shard_leader", "1 if a ready member holds the locks of a shard that should act; 0 if none does, or if all wait for a lock that the mesh does not manage. No series for operators without leader election.", "namespace", "shardingconfig", "shard")
	// ShardReadyMembers is the number of ready pods of a shard.
	ShardReadyMembers = gauges("ctrlmesh_shard_ready_members", "Ready members of a shard that should act.", "namespace", "shardingconfig", "shard")
	// NotReady is 1 for each configuration that is not Ready.
	NotReady = gauges("ctrlmesh_shardingconfig_not_ready", "1 for a ShardingConfig that is not Ready, with the reason of that condition. Derived ones are left out.", "namespace", "shardingconfig", "reason")
	// LocksFreed counts the locks that were freed after their holder exited.
	LocksFreed = counter("ctrlmesh_locks_freed_total", "Leases, ConfigMaps and Endpoints of shards' locks that were freed because the process that held them had exited.")
	// StampedObjects counts objects that were stamped.
	StampedObjects = counters("ctrlmesh_stamped_objects_total", "Objects labelled, by the webhook at admission or by the sweep. Those that a MutatingAdmissionPolicy labels are not counted.", "by")
	// AdmissionRefusals counts requests that webhooks refused.
	AdmissionRefusals = counters("ctrlmesh_admission_refusals_total", "Requests that a webhook of the mesh refused.", "webhook", "reason")
	// UnresolvedAddresses is how many of apiserver.addresses do not resolve.
	UnresolvedAddresses = gauge("ctrlmesh_manager_unresolved_addresses", "Names in apiserver.addresses of the platform settings that do not resolve.")
	// PlatformInvalid is 1 while the administrator's settings are invalid.
	PlatformInvalid = gauge("ctrlmesh_manager_platform_settings_invalid", "1 while ConfigMap ctrlmesh-platform is invalid, so that the former settings apply.")
	// ConnectionsRefused counts connections that the manager closed because of a bound.
	ConnectionsRefused = counters("ctrlmesh_manager_connections_refused_total", "Connections to a port of the manager (push, webhook, metrics or health) that were closed, and the bound that they exceeded: per-peer or total.", "port", "bound")
	// RequestsRefused counts requests that the manager refused because of a bound.
	RequestsRefused = counters("ctrlmesh_manager_requests_refused_total", "Requests to a port of the manager that were refused, and the bound that they exceeded: size, memory, concurrency or rate.", "port", "bound")
)

// register makes metrics of controller-runtime's registry, which the manager serves.
var register = promauto.With(metrics.Registry)

func gauge(name, help string) prometheus.Gauge {
	return register.NewGauge(prometheus.GaugeOpts{Name: name, Help: help})
}

func gauges(name, help string, labels ...string) *prometheus.GaugeVec {
	return register.NewGaugeVec(prometheus.GaugeOpts{Name: name, Help: help}, labels)
}

func counter(name, help string) prometheus.Counter {
	return register.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
}

func counters(name, help string, labels ...string) *prometheus.CounterVec {
	return register.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
}

// Shard is what the series of a shard are labelled with.
type Shard struct{ Namespace, Config, Name string }

// Forget removes the series of a shard.
func (s Shard) Forget() {
	ShardNamespaces.DeleteLabelValues(s.Namespace, s.Config, s.Name)
	ShardWeight.DeleteLabelValues(s.Namespace, s.Config, s.Name)
	OutdatedPods.DeleteLabelValues(s.Namespace, s.Config, s.Name)
	s.ForgetLeader()
}

// ForgetLeader removes the series of the leader of a shard that no longer acts.
func (s Shard) ForgetLeader() {
	ShardLeader.DeleteLabelValues(s.Namespace, s.Config, s.Name)
	ShardReadyMembers.DeleteLabelValues(s.Namespace, s.Config, s.Name)
}

// CountLeader sets the series of a shard's leader and ready members.
func (s Shard) CountLeader(elects, led bool, ready int) {
	ShardReadyMembers.WithLabelValues(s.Namespace, s.Config, s.Name).Set(float64(ready))
	if !elects {
		ShardLeader.DeleteLabelValues(s.Namespace, s.Config, s.Name)
		return
	}
	value := 0.0
	if led {
		value = 1
	}
	ShardLeader.WithLabelValues(s.Namespace, s.Config, s.Name).Set(value)
}

// ForgetRoot removes the series of a deleted root.
func ForgetRoot(namespace, config string) {
	of := prometheus.Labels{"namespace": namespace, "shardingconfig": config}
	ShardNamespaces.DeletePartialMatch(of)
	ShardWeight.DeletePartialMatch(of)
	ShardLeader.DeletePartialMatch(of)
	ShardReadyMembers.DeletePartialMatch(of)
	Handovers.DeletePartialMatch(of)
	HandoversPending.Delete(of)
	ShardSkew.Delete(of)
	UndividedResources.DeletePartialMatch(of)
	ForeignWrites.Delete(of)
	IdleShards.Delete(of)
	Rollbacks.Delete(of)
	CountRollout(namespace, config, nil)
}

// CountRollout sets the metrics of the rollout of a root; there are none without one.
func CountRollout(namespace, config string, rollout *v1alpha1.RolloutStatus) {
	if rollout == nil {
		of := prometheus.Labels{"namespace": namespace, "shardingconfig": config}
		OutdatedPods.DeletePartialMatch(of)
		RolloutHalted.Delete(of)
		return
	}
	halted := 0.0
	if rollout.Phase == v1alpha1.RolloutHalted {
		halted = 1
	}
	RolloutHalted.WithLabelValues(namespace, config).Set(halted)
	for _, s := range rollout.Shards {
		OutdatedPods.WithLabelValues(namespace, config, s.Name).Set(float64(s.Pods - s.Updated))
	}
}

// CountWrites sets the metrics of what shards of a root write beyond what they own, and of those
// that do not write.
func CountWrites(namespace, config string, root *v1alpha1.RootStatus) {
	evidence := map[string]int{"writes": 0, "watches": 0}
	for _, u := range root.Undivided {
		if u.Common > 0 {
			evidence["writes"]++
		} else {
			evidence["watches"]++
		}
	}
	for name, n := range evidence {
		UndividedResources.WithLabelValues(namespace, config, name).Set(float64(n))
	}
	foreign := int64(0)
	for _, f := range root.ForeignWrites {
		foreign += f.Writes
	}
	ForeignWrites.WithLabelValues(namespace, config).Set(float64(foreign))
	idle := collect.Count(root.Shards, func(s v1alpha1.ShardStatus) bool { return s.Idle })
	IdleShards.WithLabelValues(namespace, config).Set(float64(idle))
}

// ByName is a gauge with a number for each object.
type ByName[N int32 | float64] struct {
	*prometheus.GaugeVec

	mu  sync.Mutex
	has map[types.NamespacedName]N
}

func byName[N int32 | float64](v *prometheus.GaugeVec) *ByName[N] { return &ByName[N]{GaugeVec: v} }

// Set replaces all numbers. A concurrent scrape misses none of the objects that stay.
func (g *ByName[N]) Set(now map[types.NamespacedName]N) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for name, n := range now {
		g.WithLabelValues(name.Namespace, name.Name).Set(float64(n))
	}
	for name := range g.has {
		if _, still := now[name]; !still {
			g.DeleteLabelValues(name.Namespace, name.Name)
		}
	}
	g.has = now
}
