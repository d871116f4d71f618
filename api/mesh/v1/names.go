package meshv1

// How agents authenticate the manager, and it them.
const (
	// ManagerCAConfigMap is the ConfigMap, in the mesh's namespace, by which agents verify
	// the manager: PEM certificates at ManagerCAKey.
	ManagerCAConfigMap = "ctrlmesh-manager-ca"
	ManagerCAKey       = "ca.crt"
	// Audience is that of the service-account tokens with which agents authenticate.
	Audience = "ctrlmesh-manager"
)

// ForwardedHeader marks a review that an agent forwards to a pod of another shard. The agent
// of that pod forwards it no further. In a response it means that this agent answered,
// because the application did not.
const ForwardedHeader = "Ctrlmesh-Forwarded"
