package trial

import (
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/runtime/schema"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

// Catalogue returns all operators, the cheapest to build first.
func Catalogue() []*Operator {
	return []*Operator{kubeControllerManager(), descheduler(), sourceController(), clusterAPI(), externalDNS(), prometheusOperator(), certManager(), pythonClient()}
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
//
// Kubernetes publishes no manifests of it, so that those of the trial are used.
func kubeControllerManager() *Operator {
	controllers := []string{
		"deployment-controller", "replicaset-controller", "replicationcontroller-controller",
		"job-controller", "cronjob-controller", "disruption-controller", "resourcequota-controller",
		"endpoints-controller", "endpointslice-controller", "endpointslice-mirroring-controller",
		"serviceaccount-controller", "persistentvolumeclaim-protection-controller", "ttl-after-finished-controller",
	}
	return &Operator{
		Name: KubeControllerManager, Home: "operators-kube-controller-manager", Kind: statefulSet,
		Images: []Image{{
			Name: "localhost/operators/kube-controller-manager", Package: KubeControllerManager, Program: "/kube-controller-manager", Command: true,
		}},
		Lock: &Lock{Name: "kcm"},
		Divided: []meshv1alpha1.ResourceGroup{
			resources("", "pods", "services", "endpoints", "replicationcontrollers", "resourcequotas", "serviceaccounts",
				"persistentvolumeclaims", "configmaps"),
			resources("apps", "deployments", "replicasets"),
			resources("batch", "jobs", "cronjobs"),
			resources("discovery.k8s.io", "endpointslices"),
			resources("policy", "poddisruptionbudgets"),
		},
		Needed: "manifests of the trial, with cluster-admin",
		Note:   "none; the publisher of `kube-root-ca.crt` stays outside the mesh, because a member sees the mesh's CA under that name",
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
		Name: "descheduler", Home: "descheduler", Kind: deployment,
		Source: Source{Chart: "charts/descheduler"},
		Images: []Image{{
			Name: "registry.k8s.io/descheduler/descheduler", Package: "sigs.k8s.io/descheduler/cmd/descheduler",
			Program: "/bin/descheduler", Command: true, User: "1000",
		}},
		Unreleased: 137 * time.Second,
		Divided:    []meshv1alpha1.ResourceGroup{resources("", "pods"), resources("policy", "poddisruptionbudgets")},
		Needed:     "values: a Deployment with leader election, its policy and interval; `image.tag`, as the chart in the module is one version older",
		Note:       "none; the lock in kube-system is discovered",
		Workload: Workload{
			Tracked: schema.GroupVersionKind{Version: "v1", Kind: "Pod"}, Evicts: true,
			Compared: slices.Concat(kinds("", "v1", "Pod"), kinds("policy", "v1", "PodDisruptionBudget")),
		},
	}
}

func sourceController() *Operator {
	return &Operator{
		Name: "source-controller", Home: "source-system", Kind: deployment,
		Source: Source{Kustomization: "config/default", Copied: "config"},
		Images: []Image{{
			Name: "fluxcd/source-controller", Package: "github.com/fluxcd/source-controller",
			Program: "/usr/local/bin/source-controller", User: "65534:65534",
		}},
		// Only the leader is ready: it alone serves artifacts, which the readiness probe asks for.
		Replicas: 1,
		Lock:     &Lock{Name: "source-controller-leader-election"},
		Divided: []meshv1alpha1.ResourceGroup{
			resources("source.toolkit.fluxcd.io", "helmrepositories", "helmcharts", "gitrepositories", "buckets", "ocirepositories"),
		},
		Needed: "nothing",
		Note:   "none; each shard serves the artifacts that it stored, so consumers need a route per shard",
		Workload: Workload{
			Tracked:  schema.GroupVersionKind{Group: "source.toolkit.fluxcd.io", Version: "v1", Kind: "HelmRepository"},
			Patches:  []string{`{"spec":{"timeout":"61s"}}`, `{"spec":{"timeout":"62s"}}`, `{"spec":{"timeout":"60s"}}`},
			Compared: kinds("source.toolkit.fluxcd.io", "v1", "HelmRepository"),
		},
	}
}

// clusterAPIImage is the published name of the core provider's image.
const clusterAPIImage = "registry.k8s.io/cluster-api/cluster-api-controller"

func clusterAPI() *Operator {
	return &Operator{
		Name: "cluster-api", Home: "capi-system", Kind: deployment, Target: "capi-controller-manager",
		Source: Source{Kustomization: "core/config/default", Copied: "core/config", Release: clusterAPIRelease, Defaults: true},
		Images: []Image{{
			Name: clusterAPIImage, Package: "sigs.k8s.io/cluster-api/core", Program: "/manager", Command: true, User: "65532",
		}},
		Requires: []string{"cert-manager"},
		Lock:     &Lock{Name: "controller-leader-election-capi"},
		Divided: []meshv1alpha1.ResourceGroup{
			resources("cluster.x-k8s.io", "clusters", "machines", "machinesets", "machinedeployments", "machinepools", "machinehealthchecks"),
			resources("infrastructure.cluster.x-k8s.io", "trialclusters", "trialmachines", "trialmachinetemplates"),
			resources("", "secrets"),
		},
		Webhook: &meshv1alpha1.WebhookConfig{CertDir: "/tmp/k8s-webhook-server/serving-certs", Port: 9443},
		Needed:  "image and pull policy as its release sets them, defaults of variables as clusterctl sets them; cert-manager for its webhooks",
		Note:    "none; reviews of its webhooks reach the shard of their namespace",
		Workload: Workload{
			Tracked: schema.GroupVersionKind{
				Group: "cluster.x-k8s.io", Version: "v1beta2", Kind: "MachineDeployment",
			},
			Patches: []string{`{"spec":{"replicas":2}}`, `{"spec":{"replicas":3}}`, `{"spec":{"replicas":1}}`},
			Compared: slices.Concat(
				kinds("cluster.x-k8s.io", "v1beta2", "Cluster", "MachineDeployment", "MachineSet", "Machine"),
				kinds("infrastructure.cluster.x-k8s.io", "v1", "TrialCluster", "TrialMachine", "TrialMachineTemplate"),
			),
			// Which one it is depends on how often the leader has tried to connect.
			Elapsed: []string{"Remote connection not established yet", "Remote connection probe failed"},
		},
	}
}

func externalDNS() *Operator {
	return &Operator{
		Name: "external-dns", Home: "external-dns", Kind: deployment,
		Source: Source{Chart: "charts/external-dns"},
		Images: []Image{{
			Name: "registry.k8s.io/external-dns/external-dns", Package: "sigs.k8s.io/external-dns", Program: "/ko-app/external-dns", User: "65532",
		}},
		Lockless: true,
		Divided:  []meshv1alpha1.ResourceGroup{resources("externaldns.k8s.io", "dnsendpoints")},
		Needed:   "values: its source and provider; `image.tag`, as the chart in the module is one version older",
		Note:     "none; it has no lock, so one pod runs outside the mesh, and its chart recreates the Deployment rather than rolling it",
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
// one needs no service outside the cluster. Its lock is in kube-system, and its Role names it.
func certManager() *Operator {
	image := func(name string) Image {
		return Image{
			Name: "quay.io/jetstack/cert-manager-" + name, Package: "github.com/cert-manager/cert-manager/cmd/" + name,
			Program: "/app/cmd/" + name + "/" + name, User: "1000",
		}
	}
	return &Operator{
		Name: "cert-manager", Home: "cert-manager", Kind: deployment,
		Source: Source{Chart: "deploy/charts/cert-manager", Release: certManagerRelease},
		Images: []Image{image("controller"), image("webhook"), image("cainjector")},
		Divided: []meshv1alpha1.ResourceGroup{
			resources("cert-manager.io", "issuers", "certificates", "certificaterequests"),
			resources("acme.cert-manager.io", "orders", "challenges"),
			resources("", "secrets"),
		},
		Needed: "its release's steps: the version in `Chart.yaml`, and the definitions as a template; values: `installCRDs`, " +
			"and no `startupapicheck`, as in its static manifests",
		Note: "none; the issuers are self-signed, and the lock in kube-system is discovered",
		Workload: Workload{
			Tracked: schema.GroupVersionKind{Group: "cert-manager.io", Version: "v1", Kind: "Certificate"},
			Patches: []string{
				`{"spec":{"dnsNames":["a.example.org","b.example.org"]}}`, `{"spec":{"dnsNames":["a.example.org"]}}`,
			},
			Compared: kinds("cert-manager.io", "v1", "Issuer", "Certificate"),
		},
	}
}

// prometheusOperator runs no Prometheus: the workload asks for no replicas, so that its
// StatefulSets have no pods.
func prometheusOperator() *Operator {
	return &Operator{
		Name: "prometheus-operator", Home: "prometheus-operator", Kind: deployment,
		Source: Source{
			Kustomization: ".", Only: []string{"kustomization.yaml", "bundle.yaml"}, Release: prometheusOperatorRelease,
		},
		Images: []Image{{
			Name: "quay.io/prometheus-operator/prometheus-operator", Package: "github.com/prometheus-operator/prometheus-operator/cmd/operator",
			Program: "/bin/operator", User: "65534",
		}},
		Lockless: true,
		Divided: []meshv1alpha1.ResourceGroup{
			resources("monitoring.coreos.com", "prometheuses", "prometheusagents", "alertmanagers", "thanosrulers",
				"servicemonitors", "podmonitors", "probes", "scrapeconfigs", "prometheusrules", "alertmanagerconfigs"),
			resources("apps", "statefulsets"),
			resources("", "secrets", "configmaps", "services", "endpoints"),
		},
		Needed: "its namespace, as its documentation sets it",
		Note:   "none; it has no lock, so one pod runs outside the mesh",
		Workload: Workload{
			Tracked:   schema.GroupVersionKind{Group: "monitoring.coreos.com", Version: "v1", Kind: "Prometheus"},
			Condition: "Reconciled",
			Patches:   []string{`{"spec":{"retention":"25h"}}`, `{"spec":{"retention":"26h"}}`, `{"spec":{"retention":"24h"}}`},
			Compared: slices.Concat(
				kinds("monitoring.coreos.com", "v1", "Prometheus", "ServiceMonitor", "PrometheusRule"),
				kinds("apps", "v1", "StatefulSet"), kinds("", "v1", "Service", "ConfigMap"),
			),
		},
	}
}

// pythonClient is not published: it shows how the official Python client behaves on the mesh. Its lock
// is a ConfigMap, whose record it writes in a way of its own, and ConfigMaps are divided.
func pythonClient() *Operator {
	return &Operator{
		Name: "python-client", Home: "python-client", Kind: deployment, Debian: "python3-kubernetes",
		Images: []Image{{
			Name: "localhost/operators/python-client", Package: "operator.py", Program: "/operator.py", Command: true, Python: true, User: "65534",
		}},
		Unreleased: 17 * time.Second,
		Divided:    []meshv1alpha1.ResourceGroup{resources("operators.example.com", "copies"), resources("", "configmaps")},
		Needed:     "manifests of the trial: an operator of 80 lines with the client of Debian's python3-kubernetes",
		Note:       "none; the lock, a ConfigMap, is discovered",
		Workload: Workload{
			Tracked:  schema.GroupVersionKind{Group: "operators.example.com", Version: "v1", Kind: "Copy"},
			Patches:  []string{`{"spec":{"data":{"key":"b"}}}`, `{"spec":{"data":{"key":"c"}}}`, `{"spec":{"data":{"key":"a"}}}`},
			Compared: slices.Concat(kinds("operators.example.com", "v1", "Copy"), kinds("", "v1", "ConfigMap")),
		},
	}
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
		{"prometheus-operator 0.95.2", "`403 Forbidden: This module version is not available`; of 0.94.0, the module `pkg/client` is not published", "prometheus-operator 0.85.0"},
		{"an operator in Java", "no Go module and no package of Debian has one, nor a client of Kubernetes for Java", "the official Python client"},
	}
}
