// Package fleetv1 has the names that operator fleet, the gateway and their tests share.
package fleetv1

const (
	// GatewayGroup is the group of the aggregated API that leads to members.
	GatewayGroup = "gateway.fleet.test"
	// GatewayVersion is its version.
	GatewayVersion = "v1"
	// ClusterPaths is where requests to members go; * is the name of the cluster.
	ClusterPaths = "/apis/" + GatewayGroup + "/" + GatewayVersion + "/clusters/*/proxy"

	// Group is the group of the list of clusters, whose resource is clusters.
	Group = "fleet.test"
	// Version is the version of the list of clusters.
	Version = "v1"

	// Label marks the ConfigMaps in members that the operator reconciles.
	Label = "fleet.test/job"
	// Want is the key of what is to be done.
	Want = "want"
	// Done is the key to which the operator copies that.
	Done = "done"
	// By is the key to which it writes its name.
	By = "by"

	// Lock is the operator's Lease.
	Lock = "fleet-leader"
)
