package trial

import (
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/intstr"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

// Catalogue returns all operators, the cheapest to build first.
func Catalogue() []*Operator {
	return []*Operator{kubeControllerManager(), descheduler(), sourceController(), clusterAPI(), externalDNS(), certManager()}
}

// Find returns an operator of the catalogue, nil if there is none of that name.
func Find(name string) *Operator {
	for _, o := range Catalogue() {
		if o.Name == name {
			return o
		}
	}
	return nil
}

// KubeControllerManager is the operator that needs no build of its own.
const KubeControllerManager = "kube-controller-manager"

// kubeControllerManager runs the controllers that the cluster's own controller manager
// gives up for the trial. The latter keeps those that run the operator itself, such as
// the controller of StatefulSets, and the publisher of kube-root-ca.crt: a member that published
// the CA of its own volumes would give the mesh's to every namespace.
func kubeControllerManager() *Operator {
	controllers := []string{
		"deployment-controller", "replicaset-controller", "replicationcontroller-controller",
		"job-controller", "cronjob-controller", "disruption-controller", "resourcequota-controller",
		"endpoints-controller", "endpointslice-controller", "endpointslice-mirroring-controller",
		"serviceaccount-controller", "persistentvolumeclaim-protection-controller", "ttl-after-finished-controller",
	}
	args := []string{
		"--leader-elect=true", "--leader-elect-resource-name=kcm", "--leader-elect-resource-namespace=$(HOME)",
		"--use-service-account-credentials=false", "--kube-api-qps=100", "--kube-api-burst=200",
		// A quota that counted a pod which was ending is corrected by the next full sync, by
		// default 5 minutes later: after the end states are compared.
		"--concurrent-resource-quota-syncs=5", "--resource-quota-sync-period=30s", "--v=1",
	}
	return &Operator{
		Name: KubeControllerManager, Kind: statefulSet,
		Command: []string{"/kube-controller-manager"}, Args: append(args, "--controllers="+strings.Join(controllers, ",")),
		Lock: &Lock{Name: "kcm"},
		Divided: []meshv1alpha1.ResourceGroup{
			resources("", "pods", "services", "endpoints", "replicationcontrollers", "resourcequotas", "serviceaccounts",
				"persistentvolumeclaims", "configmaps"),
			resources("apps", "deployments", "replicasets"),
			resources("batch", "jobs", "cronjobs"),
			resources("discovery.k8s.io", "endpointslices"),
			resources("policy", "poddisruptionbudgets"),
		},
		Probe: &corev1.Probe{ProbeHandler: corev1.ProbeHandler{
			HTTPGet: &corev1.HTTPGetAction{Path: "/healthz", Port: intstr.FromInt32(10257), Scheme: corev1.URISchemeHTTPS},
		}},
		Note: "none; the publisher of `kube-root-ca.crt` stays outside the mesh, because a member sees the mesh's CA under that name",
		Workload: Workload{
			Tracked: schema.GroupVersionKind{Group: "apps", Version: "v1", Kind: deployment},
			Patches: []string{`{"spec":{"replicas":3}}`, `{"spec":{"replicas":1}}`, `{"spec":{"replicas":2}}`},
			Compared: slices.Concat(
				kinds("apps", "v1", deployment, "ReplicaSet"),
				kinds("", "v1", "Pod", "Service", "Endpoints", "ReplicationController", "ResourceQuota", "ServiceAccount",
					"PersistentVolumeClaim", "ConfigMap"),
				kinds("batch", "v1", "Job"), kinds("policy", "v1", "PodDisruptionBudget"), kinds("discovery.k8s.io", "v1", "EndpointSlice")),
		},
		Controllers: controllers,
	}
}

func descheduler() *Operator {
	return &Operator{
		Name: "descheduler", Kind: deployment,
		Command: []string{"/operator"},
		Args: []string{
			"--policy-config-file=/policy/policy.yaml", "--descheduling-interval=5s", "--v=2", "--leader-elect=true",
		},
		Unreleased: 137 * time.Second,
		Divided:    []meshv1alpha1.ResourceGroup{resources("", "pods"), resources("policy", "poddisruptionbudgets")},
		Note:       "none; the lock in kube-system is discovered",
		Volumes: map[string]corev1.VolumeSource{
			"/policy": {ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: corev1.LocalObjectReference{Name: "descheduler"}}},
			"/tmp":    {EmptyDir: &corev1.EmptyDirVolumeSource{}},
		},
		Workload: Workload{
			Tracked: schema.GroupVersionKind{Version: "v1", Kind: "Pod"}, Evicts: true,
			Compared: slices.Concat(kinds("", "v1", "Pod"), kinds("policy", "v1", "PodDisruptionBudget")),
		},
	}
}

func sourceController() *Operator {
	return &Operator{
		Name: "source-controller", Kind: deployment,
		Command: []string{"/operator"},
		Args: []string{
			"--watch-all-namespaces", "--enable-leader-election", "--storage-path=/data",
			"--storage-adv-addr=source-controller.$(HOME).svc.cluster.local.", "--events-addr=",
		},
		Lock: &Lock{Name: "source-controller-leader-election"},
		Divided: []meshv1alpha1.ResourceGroup{
			resources("source.toolkit.fluxcd.io", "helmrepositories", "helmcharts", "gitrepositories", "buckets", "ocirepositories"),
		},
		Note:  "none; each shard serves the artifacts that it stored, so consumers need a route per shard",
		CRDs:  []string{"config/crd/bases/*.yaml"},
		Probe: httpProbe("/readyz", 9440),
		Volumes: map[string]corev1.VolumeSource{
			"/data": {EmptyDir: &corev1.EmptyDirVolumeSource{}}, "/tmp": {EmptyDir: &corev1.EmptyDirVolumeSource{}},
		},
		Workload: Workload{
			Tracked:  schema.GroupVersionKind{Group: "source.toolkit.fluxcd.io", Version: "v1", Kind: "HelmRepository"},
			Patches:  []string{`{"spec":{"timeout":"61s"}}`, `{"spec":{"timeout":"62s"}}`, `{"spec":{"timeout":"60s"}}`},
			Compared: kinds("source.toolkit.fluxcd.io", "v1", "HelmRepository"),
		},
	}
}

func clusterAPI() *Operator {
	return &Operator{
		Name: "cluster-api", Kind: deployment,
		Command: []string{"/operator"},
		Args: []string{
			"--leader-elect", "--insecure-diagnostics=true", "--diagnostics-address=:8080",
			"--skip-crd-migration-phases=StorageVersionMigration,CleanupManagedFields",
		},
		Lock: &Lock{Name: "controller-leader-election-capi"},
		Divided: []meshv1alpha1.ResourceGroup{
			resources("cluster.x-k8s.io", "clusters", "machines", "machinesets", "machinedeployments", "machinepools", "machinehealthchecks"),
			resources("infrastructure.example.com", "trialclusters", "trialmachines", "trialmachinetemplates"),
			resources("", "secrets"),
		},
		Note:        "none; reviews of its webhooks reach the shard of their namespace",
		Certificate: "/tmp/k8s-webhook-server/serving-certs",
		Webhooks:    "core/config/webhook/manifests.yaml",
		CRDs:        []string{"core/config/crd/bases/*.yaml"},
		Probe:       httpProbe("/readyz", 9440),
		Workload: Workload{
			Tracked: schema.GroupVersionKind{
				Group: "cluster.x-k8s.io", Version: "v1beta2", Kind: "MachineDeployment",
			},
			Patches: []string{`{"spec":{"replicas":2}}`, `{"spec":{"replicas":3}}`, `{"spec":{"replicas":1}}`},
			Compared: slices.Concat(
				kinds("cluster.x-k8s.io", "v1beta2", "Cluster", "MachineDeployment", "MachineSet", "Machine"),
				kinds("infrastructure.example.com", "v1", "TrialCluster", "TrialMachine", "TrialMachineTemplate"),
			),
			// Which one it is depends on how often the leader has tried to connect.
			Elapsed: []string{"Remote connection not established yet", "Remote connection probe failed"},
		},
	}
}

func externalDNS() *Operator {
	return &Operator{
		Name: "external-dns", Kind: deployment,
		Command: []string{"/operator"},
		Args: []string{
			"--source=crd", "--crd-source-apiversion=externaldns.k8s.io/v1alpha1", "--crd-source-kind=DNSEndpoint",
			"--provider=inmemory", "--inmemory-zone=example.org", "--registry=noop", "--interval=3s", "--min-event-sync-interval=1s",
		},
		Lockless: true,
		Divided:  []meshv1alpha1.ResourceGroup{resources("externaldns.k8s.io", "dnsendpoints")},
		Note:     "none; it has no lock, so one pod runs outside the mesh, and the Deployment is recreated rather than rolled",
		CRDs:     []string{"config/crd/standard/*.yaml"},
		Probe:    httpProbe("/healthz", 7979),
		Workload: Workload{
			Tracked: schema.GroupVersionKind{Group: "externaldns.k8s.io", Version: "v1alpha1", Kind: "DNSEndpoint"},
			Patches: []string{
				`{"spec":{"endpoints":[{"dnsName":"a.example.org","recordType":"A","recordTTL":61,"targets":["192.0.2.1"]}]}}`,
				`{"spec":{"endpoints":[{"dnsName":"a.example.org","recordType":"A","recordTTL":62,"targets":["192.0.2.1"]}]}}`,
			},
			Compared: kinds("externaldns.k8s.io", "v1alpha1", "DNSEndpoint"),
		},
	}
}

// certManager stands for external-secrets: both write Secrets as their custom resources say, and this
// one needs no service outside the cluster. Its lock is in kube-system.
func certManager() *Operator {
	return &Operator{
		Name: "cert-manager", Kind: deployment,
		Command: []string{"/operator"},
		Args:    []string{"--cluster-resource-namespace=$(HOME)", "--kube-api-qps=100", "--kube-api-burst=200", "--v=2"},
		Lock:    &Lock{Namespace: metav1.NamespaceSystem, Name: "cert-manager-controller"},
		Divided: []meshv1alpha1.ResourceGroup{
			resources("cert-manager.io", "issuers", "certificates", "certificaterequests"),
			resources("acme.cert-manager.io", "orders", "challenges"),
			resources("", "secrets"),
		},
		Note: "none; the issuers are self-signed, and its webhooks are not registered",
		CRDs: []string{"deploy/crds/*.yaml"},
		Workload: Workload{
			Tracked: schema.GroupVersionKind{Group: "cert-manager.io", Version: "v1", Kind: "Certificate"},
			Patches: []string{
				`{"spec":{"dnsNames":["a.example.org","b.example.org"]}}`, `{"spec":{"dnsNames":["a.example.org"]}}`,
			},
			Compared: kinds("cert-manager.io", "v1", "Issuer", "Certificate"),
		},
	}
}

func httpProbe(path string, port int32) *corev1.Probe {
	return &corev1.Probe{ProbeHandler: corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Path: path, Port: intstr.FromInt32(port)}}}
}

// Excluded is an operator, or a version of one, that does not build here.
type Excluded struct{ Name, Error, Instead string }

// Exclusions are the operators that do not build from their published modules alone, with the
// error of the go command.
func Exclusions() []Excluded {
	return []Excluded{
		{"external-secrets 1.3.2", "its go.mod replaces apis, runtime and every provider by local folders, and none of these is published: " +
			"`external-secrets/apis: invalid version: 403 Forbidden: This module version is not available`", "cert-manager 1.11.5"},
		{"source-controller 1.10.1", "`requires go >= 1.27.0 (running go 1.26.8)`; of 1.9.6, `fluxcd/pkg/artifact@v0.18.3: 403 Forbidden`", "source-controller 1.9.0"},
		{"external-dns 0.23.0", "`requires go >= 1.27.0 (running go 1.26.8)`; of 0.22.0, `exoscale/egoscale/v3@v3.1.44: 403 Forbidden`", "external-dns 0.21.0"},
	}
}
