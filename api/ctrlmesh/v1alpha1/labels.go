package v1alpha1

// Labels and annotations that act as API.
const (
	// EnableProxyLabel on a pod template, with value "true", puts the pod on the mesh.
	EnableProxyLabel = GroupName + "/enable-proxy"

	// TrustAnnotation is written on a pod at admission: which CAs its clients
	// were given to trust. A pod without it was not admitted by the mesh and is
	// never captured, because its clients could not verify the proxy.
	TrustAnnotation = GroupName + "/trust"

	// CaptureAnnotation on a pod template chooses how the pod's traffic reaches
	// the proxy: "ebpf", "iptables" or "address". Without it the node's agent
	// chooses. It counts when a pod is created.
	CaptureAnnotation = GroupName + "/capture"

	// KubeconfigAnnotation on a pod template, for pods captured by address, is the
	// absolute path, in every container, of a kubeconfig that the image reads
	// though neither KUBECONFIG nor --kubeconfig names it. It is replaced by one
	// that leads to the mesh. "none" leaves all kubeconfigs alone: what is done with
	// them goes past the mesh, as is right for another cluster's.
	KubeconfigAnnotation = GroupName + "/kubeconfig"

	// KubeconfigContentAnnotation is written on a pod at admission, if it is
	// captured by address: the kubeconfig that its containers were given.
	KubeconfigContentAnnotation = GroupName + "/kubeconfig-content"

	// NamespaceLabel on a sharded object is the name of its namespace.
	NamespaceLabel = GroupName + "/namespace"

	// ShardingHashLabel on a sharded object is the bucket of its namespace, "0" to "31".
	ShardingHashLabel = GroupName + "/sharding-hash"

	// ShardLabel on a pod is the derived shard that it was assigned to. Written by
	// the manager; a change by anybody else moves nothing, and is undone.
	ShardLabel = GroupName + "/shard"

	// RootLabel on a derived ShardingConfig is the name of the one it was derived from.
	RootLabel = GroupName + "/auto-sharding-root"

	// HandoverFinalizer on a ShardingConfig with spec.root keeps it until no member
	// acts on its shards any more.
	HandoverFinalizer = GroupName + "/handover"

	// LockHeldLabel on a leader-election lock (Lease, ConfigMap or Endpoints), with
	// value "true", means that the mesh holds it. An admission policy rejects writes
	// by anybody but the manager.
	LockHeldLabel = GroupName + "/lock-held"

	// LockHolderAnnotation on a lock that the mesh holds names the ShardingConfig that
	// it is held for, as namespace/name.
	LockHolderAnnotation = GroupName + "/lock-held-for"

	// ControlLabel on a sharded object, with value "true", says that the mesh
	// stamped it.
	ControlLabel = GroupName + "/control"

	// TrustEgressAnnotation on a pod template, with value "true", lets the pod's clients
	// trust the egress CA too, so that rules see paths within TLS. It counts when a pod
	// is created.
	TrustEgressAnnotation = GroupName + "/trust-egress"

	// EgressTrustAnnotation on a pod, with value "true", says that its clients were given
	// the egress CA. Written at admission, and fixed then.
	EgressTrustAnnotation = GroupName + "/egress-trust"

	// NoFaultsLabel on a namespace, whatever its value but "false", forbids fault injection:
	// to the pods there, and for the objects there.
	NoFaultsLabel = GroupName + "/no-faults"

	// RecoverAnnotation on a CircuitBreaker closes its opened breakers whenever its
	// value changes.
	RecoverAnnotation = GroupName + "/recover"

	// DisableBreakerLabel and DisableFaultsLabel on a CircuitBreaker and on a
	// FaultInjection take all effect away, whatever their values; so does spec.disabled.
	DisableBreakerLabel = "circuitbreaker." + GroupName + "/disable"
	DisableFaultsLabel  = "faultinjection." + GroupName + "/disable"
)

// Values of CaptureAnnotation.
const (
	CaptureEBPF     = "ebpf"
	CaptureIPTables = "iptables"
	CaptureAddress  = "address"
)

// KubeconfigNone is the value of KubeconfigAnnotation by which none is replaced.
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
