package v1alpha1

// Labels and annotations that act as API.
const (
	// EnableProxyLabel on a pod template, with value "true", puts the pod on the mesh.
	EnableProxyLabel = GroupName + "/enable-proxy"

	// TrustAnnotation is written on a pod at admission, and names the CAs that its
	// clients trust. A pod without it was not admitted by the mesh and is never
	// captured, because its clients could not verify the proxy.
	TrustAnnotation = GroupName + "/trust"

	// CaptureAnnotation on a pod template chooses how the pod's traffic reaches
	// the proxy: "ebpf", "iptables" or "address". Without it the node's agent
	// chooses. It is read when a pod is created.
	CaptureAnnotation = GroupName + "/capture"

	// KubeconfigAnnotation on a pod template, for pods captured by address, is the
	// absolute path, in every container, of a kubeconfig that the image reads
	// although neither KUBECONFIG nor --kubeconfig names it. It is replaced by one
	// for the mesh. With "none", no kubeconfig is replaced: requests with them bypass
	// the mesh, as they must for another cluster.
	KubeconfigAnnotation = GroupName + "/kubeconfig"

	// KubeconfigContentAnnotation is written on a pod at admission, if it is
	// captured by address. It has the kubeconfig of its containers.
	KubeconfigContentAnnotation = GroupName + "/kubeconfig-content"

	// NamespaceLabel on a sharded object is the name of its namespace.
	NamespaceLabel = GroupName + "/namespace"

	// ShardingHashLabel on a sharded object, and on its namespace, is the bucket of the namespace,
	// "0" to "31".
	ShardingHashLabel = GroupName + "/sharding-hash"

	// StampedAnnotation on the MutatingWebhookConfiguration for stamping is the resources that the
	// MutatingAdmissionPolicy stamps, separated by commas: RESOURCE or RESOURCE.GROUP.
	StampedAnnotation = GroupName + "/stamped"

	// VirtualAppsLabel on a namespace, with value "true", means that it has VirtualApps: a
	// MutatingAdmissionPolicy puts the pods that they select on the mesh.
	VirtualAppsLabel = GroupName + "/virtualapps"

	// ShardLabel on a pod is the derived shard that it was assigned to. The manager
	// writes it, and reverts changes by others.
	ShardLabel = GroupName + "/shard"

	// OwnerShardLabel on a namespace is the derived shard that is to own it, instead of the one
	// that the root would choose. Roots without a shard of that name ignore it.
	OwnerShardLabel = GroupName + "/owner-shard"

	// RootLabel on a derived ShardingConfig is the name of the one it was derived from.
	RootLabel = GroupName + "/auto-sharding-root"

	// HandoverFinalizer on a ShardingConfig with spec.root keeps it until no member
	// acts on its shards any more.
	HandoverFinalizer = GroupName + "/handover"

	// LockHeldLabel on a leader-election lock (Lease, ConfigMap or Endpoints), with
	// value "true", means that the mesh holds it. An admission policy rejects writes
	// by others than the manager.
	LockHeldLabel = GroupName + "/lock-held"

	// LockHolderAnnotation on a lock that the mesh holds names the ShardingConfig for
	// which it does so, as namespace/name.
	LockHolderAnnotation = GroupName + "/lock-held-for"

	// LockAccessLabel on a Role or RoleBinding, with value "true", means that the manager
	// wrote it, so that an operator may update the locks of its shards.
	LockAccessLabel = GroupName + "/lock-access"

	// ControlLabel on a sharded object, with value "true", means that the mesh
	// stamped it.
	ControlLabel = GroupName + "/control"

	// TrustEgressAnnotation on a pod template, with value "true", lets the pod's clients
	// trust the egress CA too, so that rules see paths within TLS. It is read when a
	// pod is created.
	TrustEgressAnnotation = GroupName + "/trust-egress"

	// EgressTrustAnnotation on a pod, with value "true", means that its clients trust the
	// egress CA. It is written at admission and cannot change.
	EgressTrustAnnotation = GroupName + "/egress-trust"

	// NoFaultsLabel on a namespace, with any value except "false", forbids fault injection
	// into requests of its pods, and into requests for its objects.
	NoFaultsLabel = GroupName + "/no-faults"

	// RecoverAnnotation on a CircuitBreaker closes its open breakers when its value
	// changes.
	RecoverAnnotation = GroupName + "/recover"

	// AllowRollbackAnnotation on a StatefulSet, with value "true", lets the manager restore its
	// template where ClusterRole ctrlmesh-rollback is bound to it. The manager cannot set it.
	AllowRollbackAnnotation = GroupName + "/allow-rollback"

	// DisableBreakerLabel on a CircuitBreaker and DisableFaultsLabel on a FaultInjection,
	// with any value, disable it, as spec.disabled does.
	DisableBreakerLabel = "circuitbreaker." + GroupName + "/disable"
	DisableFaultsLabel  = "faultinjection." + GroupName + "/disable"
)

// Values of CaptureAnnotation.
const (
	CaptureEBPF     = "ebpf"
	CaptureIPTables = "iptables"
	CaptureAddress  = "address"
)

// KubeconfigNone is the value of KubeconfigAnnotation with which no kubeconfig is replaced.
const KubeconfigNone = "none"

// LockIdentityPrefix begins the holder identity of locks that the mesh holds. The
// namespace and name of the ShardingConfig follow, as namespace/name.
const LockIdentityPrefix = "ctrlmesh:"

// Values of TrustAnnotation.
const (
	// TrustMesh: the mesh CA alone, so that TLS refuses the real apiserver.
	TrustMesh = "mesh"
	// TrustBoth: the mesh CA and the cluster's.
	TrustBoth = "mesh-and-cluster"
)
