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
	// Policies is the number of pods by the state of their policy.
	Policies = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "ctrlmesh_policies",
		Help: "Labelled pods by the state of their policy: applied, pending, rejected or unscheduled.",
	}, []string{"state"})
	// PolicyLag is the number of scheduled pods that do not hold the wanted version.
	PolicyLag = prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "ctrlmesh_policy_lag",
		Help: "Scheduled pods whose agent does not apply the wanted version of their policy.",
	})
	// PolicyNacks counts policies that agents could not apply.
	PolicyNacks = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "ctrlmesh_policy_nacks_total",
		Help: "Policies that an agent answered with an error.",
	})
	// MeshCAExpiry is when the mesh CA's newest certificate ends.
	MeshCAExpiry = prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "ctrlmesh_mesh_ca_expiry_timestamp_seconds",
		Help: "When the newest certificate of the mesh CA ends.",
	})
	// Members is the number of pods of each configuration.
	Members = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "ctrlmesh_members",
		Help: "Pods that a ShardingConfig selects.",
	}, []string{"namespace", "shardingconfig"})
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
)

func init() {
	metrics.Registry.MustRegister(AgentsConnected, Policies, PolicyLag, PolicyNacks, MeshCAExpiry, Members, StampedObjects, AdmissionRefusals)
}
