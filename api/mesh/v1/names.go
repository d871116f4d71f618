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
