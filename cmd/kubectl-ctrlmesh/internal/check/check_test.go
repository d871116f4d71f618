package check

import (
	"errors"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/meshtest"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/snapshot"
	"github.com/ctrlmesh/ctrlmesh/manager/inject"
	"github.com/ctrlmesh/ctrlmesh/manager/platform"
	"github.com/ctrlmesh/ctrlmesh/manager/trust"
	"github.com/ctrlmesh/ctrlmesh/tests/docs"
)

const mesh = snapshot.DefaultNamespace

// tenYears is the life of a CA.
const tenYears = 10 * 365 * 24 * time.Hour

// checked runs a check in a cluster.
func checked(t *testing.T, c *meshtest.Cluster) Report {
	t.Helper()
	s, err := c.Reader(t).Read(t.Context(), Parts()...)
	require.NoError(t, err)
	return Run(s)
}

func TestHealthyClusterHasNoFindings(t *testing.T) {
	r := checked(t, meshtest.Healthy(t))
	require.Empty(t, r.Findings)
	require.True(t, r.Healthy)
}

type cluster = *meshtest.Cluster

func config(t *testing.T, c cluster) *v1alpha1.ShardingConfig {
	return meshtest.Find[*v1alpha1.ShardingConfig](t, c, meshtest.Operator, meshtest.Operator)
}

func pod(t *testing.T, c cluster, namespace, name string) *corev1.Pod {
	return meshtest.Find[*corev1.Pod](t, c, namespace, name)
}

func image(tag string) string { return "registry.example.com:5000/ctrlmesh/agent:" + tag }

// faults are planted in a healthy cluster. Each is found, and nothing else.
var faults = map[string]struct {
	plant func(*testing.T, cluster)
	// finds are the severity and kind of each finding, and a part of its text.
	finds []string
}{
	"no definition": {func(t *testing.T, c cluster) {
		meshtest.Remove[*apiextensionsv1.CustomResourceDefinition](t, c, "", "faultinjections.ctrlmesh.kusionstack.io")
	}, []string{"error crd-missing faultinjections.ctrlmesh.kusionstack.io"}},
	"no definition of a dialect": {func(t *testing.T, c cluster) {
		meshtest.Remove[*apiextensionsv1.CustomResourceDefinition](t, c, "", "virtualapps.ctrlmesh.kruise.io")
	}, []string{"error crd-missing virtualapps.ctrlmesh.kruise.io"}},
	"a dialect that is not served": {func(t *testing.T, c cluster) {
		meshtest.Remove[*apiextensionsv1.CustomResourceDefinition](t, c, "", "virtualapps.ctrlmesh.kruise.io")
		meshtest.Remove[*admissionv1.MutatingWebhookConfiguration](t, c, "", "ctrlmesh-virtualapps")
		d := meshtest.Find[*appsv1.Deployment](t, c, mesh, snapshot.Manager)
		d.Spec.Template.Spec.Containers[0].Args = []string{"--dialects=false"}
	}, nil},
	"a definition without fields": {func(t *testing.T, c cluster) {
		crd := meshtest.Find[*apiextensionsv1.CustomResourceDefinition](t, c, "", "shardingconfigs.ctrlmesh.kusionstack.io")
		delete(crd.Spec.Versions[0].Schema.OpenAPIV3Schema.Properties["spec"].Properties, "shadow")
		delete(crd.Spec.Versions[0].Schema.OpenAPIV3Schema.Properties["spec"].Properties["root"].Properties, "rollout")
	}, []string{"error crd-old lacks fields of this version: spec.root.rollout, spec.shadow"}},
	"a definition with more fields": {func(t *testing.T, c cluster) {
		crd := meshtest.Find[*apiextensionsv1.CustomResourceDefinition](t, c, "", "shardingconfigs.ctrlmesh.kusionstack.io")
		crd.Spec.Versions[0].Schema.OpenAPIV3Schema.Properties["spec"].Properties["newer"] = apiextensionsv1.JSONSchemaProps{Type: "string"}
	}, nil},
	"one replica of the manager": {func(t *testing.T, c cluster) {
		meshtest.Find[*appsv1.Deployment](t, c, mesh, snapshot.Manager).Status.ReadyReplicas = 1
	}, []string{"warning manager-not-ready 1 of 2 replicas"}},
	"no replica of the manager": {func(t *testing.T, c cluster) {
		meshtest.Find[*appsv1.Deployment](t, c, mesh, snapshot.Manager).Status.ReadyReplicas = 0
	}, []string{"error manager-not-ready none of 2 replicas"}},
	"no manager": {func(t *testing.T, c cluster) {
		meshtest.Remove[*appsv1.Deployment](t, c, mesh, snapshot.Manager)
	}, []string{"error manager-missing Deployment ctrlmesh-manager does not exist"}},
	"no leader of the manager": {func(t *testing.T, c cluster) {
		meshtest.Find[*coordinationv1.Lease](t, c, mesh, snapshot.Manager).Spec.RenewTime = new(metav1.NewMicroTime(meshtest.Now.Add(-time.Minute)))
	}, []string{"error manager-leaderless"}},
	"no DaemonSet": {func(t *testing.T, c cluster) {
		meshtest.Remove[*appsv1.DaemonSet](t, c, mesh, snapshot.Agent)
	}, []string{"error agents-missing"}},
	"agents that clean up": {func(t *testing.T, c cluster) {
		meshtest.Find[*appsv1.DaemonSet](t, c, mesh, snapshot.Agent).Spec.Template.Spec.Containers[0].Args = []string{"cleanup", "--wait"}
	}, []string{"error agents-clean-up DaemonSet ctrlmesh-agent removes the redirections"}},
	"no agent on a node with members": {func(t *testing.T, c cluster) {
		meshtest.Remove[*corev1.Pod](t, c, mesh, snapshot.Agent+"-1")
	}, []string{"error agent-missing node node-1 has no agent, so that its labelled pods (2)"}},
	"an agent that is not ready": {func(t *testing.T, c cluster) {
		meshtest.Unready(pod(t, c, mesh, snapshot.Agent+"-2"))
	}, []string{"error agent-not-ready agent ctrlmesh-agent-2 on node node-2"}},
	"an agent that is not ready on a node without members": {func(_ *testing.T, c cluster) {
		agent := meshtest.Pod(mesh, snapshot.Agent+"-3", "node-3")
		agent.Labels = map[string]string{snapshot.NameLabel: snapshot.Agent}
		agent.Spec.Containers = []corev1.Container{{Image: image(meshtest.Version)}}
		meshtest.Unready(agent)
		c.Add(agent)
	}, []string{"warning agent-not-ready node-3"}},
	"a takeover": {func(t *testing.T, c cluster) {
		successor := pod(t, c, mesh, snapshot.Agent+"-2").DeepCopy()
		successor.Name = snapshot.Agent + "-2b"
		meshtest.Unready(successor)
		c.Add(successor)
	}, nil},
	"agents of two versions": {func(t *testing.T, c cluster) {
		pod(t, c, mesh, snapshot.Agent+"-2").Spec.Containers[0].Image = image("v0.3.2")
	}, []string{"warning agent-versions v0.3.1, v0.3.2"}},
	"agents of another minor version": {func(t *testing.T, c cluster) {
		pod(t, c, mesh, snapshot.Agent+"-1").Spec.Containers[0].Image = image("v0.4.0")
		pod(t, c, mesh, snapshot.Agent+"-2").Spec.Containers[0].Image = image("v0.4.0")
	}, []string{"warning version-skew the manager has version v0.3.1, and agents have v0.4.0"}},
	"no webhook configuration": {func(t *testing.T, c cluster) {
		meshtest.Remove[*admissionv1.ValidatingWebhookConfiguration](t, c, "", "ctrlmesh")
	}, []string{"error webhook-missing ValidatingWebhookConfiguration ctrlmesh"}},
	"no webhook configuration for stamping": {func(t *testing.T, c cluster) {
		meshtest.Remove[*admissionv1.MutatingWebhookConfiguration](t, c, "", "ctrlmesh-stamp")
	}, []string{"error webhook-missing MutatingWebhookConfiguration ctrlmesh-stamp"}},
	"no webhook": {func(t *testing.T, c cluster) {
		w := meshtest.Find[*admissionv1.ValidatingWebhookConfiguration](t, c, "", "ctrlmesh")
		w.Webhooks = w.Webhooks[1:]
	}, []string{"error webhook-missing shardingconfigs.ctrlmesh.kusionstack.io"}},
	"a webhook that may fail": {func(t *testing.T, c cluster) {
		meshtest.Find[*admissionv1.MutatingWebhookConfiguration](t, c, "", "ctrlmesh").Webhooks[0].FailurePolicy = new(admissionv1.Ignore)
	}, []string{"error webhook-policy pods.ctrlmesh.kusionstack.io has failurePolicy Ignore"}},
	"webhooks without a CA": {func(t *testing.T, c cluster) {
		meshtest.Find[*admissionv1.MutatingWebhookConfiguration](t, c, "", "ctrlmesh").Webhooks[1].ClientConfig.CABundle = nil
	}, []string{"error webhook-ca MutatingWebhookConfiguration ctrlmesh has no certificate"}},
	"webhooks with an expired CA": {func(t *testing.T, c cluster) {
		for i := range meshtest.Find[*admissionv1.ValidatingWebhookConfiguration](t, c, "", "ctrlmesh").Webhooks {
			meshtest.Find[*admissionv1.ValidatingWebhookConfiguration](t, c, "", "ctrlmesh").Webhooks[i].ClientConfig.CABundle = meshtest.Certificate(t, tenYears+time.Hour)
		}
	}, []string{"error webhook-ca ValidatingWebhookConfiguration ctrlmesh expired at 2026-01-02T02:04:05Z"}},
	"webhooks with a CA that expires": {func(t *testing.T, c cluster) {
		meshtest.Find[*admissionv1.ValidatingWebhookConfiguration](t, c, "", "ctrlmesh").Webhooks[0].ClientConfig.CABundle = meshtest.Certificate(t, tenYears-29*24*time.Hour)
	}, []string{"warning webhook-ca expires at 2026-01-31T03:04:05Z"}},
	"no admission policy": {func(t *testing.T, c cluster) {
		meshtest.Remove[*admissionv1.ValidatingAdmissionPolicy](t, c, "", "ctrlmesh-locks")
	}, []string{"error policy-missing ValidatingAdmissionPolicy ctrlmesh-locks"}},
	"no binding of a policy": {func(t *testing.T, c cluster) {
		meshtest.Remove[*admissionv1.ValidatingAdmissionPolicyBinding](t, c, "", "ctrlmesh-pods")
	}, []string{"error policy-missing ValidatingAdmissionPolicyBinding ctrlmesh-pods"}},
	"a policy that only warns": {func(t *testing.T, c cluster) {
		meshtest.Find[*admissionv1.ValidatingAdmissionPolicyBinding](t, c, "", "ctrlmesh-pods").Spec.ValidationActions = []admissionv1.ValidationAction{admissionv1.Warn}
	}, []string{"error policy-not-enforced ctrlmesh-pods does not deny"}},
	"a policy that may fail": {func(t *testing.T, c cluster) {
		meshtest.Find[*admissionv1.ValidatingAdmissionPolicy](t, c, "", "ctrlmesh-pods").Spec.FailurePolicy = new(admissionv1.Ignore)
	}, []string{"error policy-not-enforced ctrlmesh-pods has failurePolicy Ignore"}},
	"no Secret of a CA": {func(t *testing.T, c cluster) {
		meshtest.Remove[*corev1.Secret](t, c, mesh, trust.MeshCASecret)
	}, []string{"error ca-missing Secret ctrlmesh-system/ctrlmesh-mesh-ca"}},
	"no CA of the manager": {func(t *testing.T, c cluster) {
		meshtest.Remove[*corev1.ConfigMap](t, c, mesh, meshv1.ManagerCAConfigMap)
	}, []string{"error ca-missing ConfigMap ctrlmesh-system/ctrlmesh-manager-ca"}},
	"a CA of the manager that expires": {func(t *testing.T, c cluster) {
		meshtest.Find[*corev1.ConfigMap](t, c, mesh, meshv1.ManagerCAConfigMap).Data[meshv1.ManagerCAKey] = string(meshtest.Certificate(t, tenYears-24*time.Hour))
	}, []string{"warning ca-expiring ctrlmesh-manager-ca expires at 2026-01-03T03:04:05Z"}},
	"no bundle of members": {func(t *testing.T, c cluster) {
		meshtest.Remove[*corev1.ConfigMap](t, c, meshtest.Operator, inject.MeshBundle)
	}, []string{"error ca-missing ConfigMap operator-demo/ctrlmesh-ca.crt"}},
	"an expired bundle": {func(t *testing.T, c cluster) {
		meshtest.Find[*corev1.ConfigMap](t, c, meshtest.Operator, inject.MeshBundle).Data["ca.crt"] = string(meshtest.Certificate(t, tenYears+time.Hour))
	}, []string{"error ca-expiring operator-demo/ctrlmesh-ca.crt expired"}},
	"no quota for critical pods": {func(t *testing.T, c cluster) {
		meshtest.Find[*appsv1.DaemonSet](t, c, mesh, snapshot.Agent).Status.CurrentNumberScheduled = 1
		c.Add(&corev1.Event{ObjectMeta: metav1.ObjectMeta{Namespace: mesh, Name: "e"}, Reason: "FailedCreate", Message: "Error creating: insufficient quota to match these scopes: [{PriorityClass In [system-node-critical system-cluster-critical]}]"})
	}, []string{"error quota-missing namespace ctrlmesh-system has none"}},
	"an old refusal of a quota": {func(_ *testing.T, c cluster) {
		c.Add(&corev1.Event{ObjectMeta: metav1.ObjectMeta{Namespace: mesh, Name: "e"}, Reason: "FailedCreate", Message: "Error creating: insufficient quota to match these scopes"})
	}, nil},
	"a quota that is used up": {func(_ *testing.T, c cluster) {
		c.Add(&corev1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Namespace: mesh, Name: "ctrlmesh-critical-pods"}, Status: corev1.ResourceQuotaStatus{
			Hard: corev1.ResourceList{corev1.ResourcePods: resource.MustParse("4")}, Used: corev1.ResourceList{corev1.ResourcePods: resource.MustParse("4")},
		}})
	}, []string{"error quota-used-up ctrlmesh-critical-pods allows 4 pods"}},
	"invalid settings": {func(_ *testing.T, c cluster) {
		c.Add(settings("stamping: {nothing: 1}"))
	}, []string{"error settings-invalid ctrlmesh-platform is invalid"}},
	"a configuration in an excluded namespace": {func(_ *testing.T, c cluster) {
		c.Add(settings("sharding: {namespaces: [team-*]}"))
	}, []string{"warning namespace-excluded ShardingConfig operator-demo/by-hand", "warning namespace-excluded ShardingConfig operator-demo/operator-demo"}},
	"a labelled pod of the mesh": {func(t *testing.T, c cluster) {
		pod(t, c, mesh, snapshot.Manager+"-1").Labels[v1alpha1.EnableProxyLabel] = "true"
	}, []string{"error namespace-excluded pod ctrlmesh-system/ctrlmesh-manager-1"}},
	"a degraded operator": {func(t *testing.T, c cluster) {
		meshtest.SetCondition(config(t, c), v1alpha1.ConditionDegraded, true, v1alpha1.ReasonBlocked, "a handover has waited for more than 30s")
	}, []string{"error operator-degraded Blocked: a handover has waited"}},
	"an unknown resource": {func(t *testing.T, c cluster) {
		meshtest.SetCondition(config(t, c), v1alpha1.ConditionReady, false, v1alpha1.ReasonUnknownResource, "foo: did you mean foos?")
	}, []string{"error operator-degraded UnknownResource: foo: did you mean foos?"}},
	"an operator that starts": {func(t *testing.T, c cluster) {
		meshtest.SetCondition(config(t, c), v1alpha1.ConditionReady, false, v1alpha1.ReasonStarting, "1 of 2 members ready")
	}, nil},
	"undivided writes": {func(t *testing.T, c cluster) {
		meshtest.SetCondition(config(t, c), v1alpha1.ConditionUndivided, true, v1alpha1.ReasonUndividedWrites, "several shards write secrets")
	}, []string{"warning operator-undivided several shards write secrets"}},
	"an idle shard": {func(t *testing.T, c cluster) {
		meshtest.SetCondition(config(t, c), v1alpha1.ConditionShardIdle, true, v1alpha1.ReasonNoWrites, "shard a")
	}, []string{"warning shard-idle NoWrites: shard a"}},
	"a shard whose Lease has expired": {func(t *testing.T, c cluster) {
		meshtest.Find[*coordinationv1.Lease](t, c, meshtest.Operator, "operator-leader---operator-demo-1-normal").Spec.RenewTime = new(metav1.NewMicroTime(meshtest.Now.Add(-16 * time.Second)))
	}, []string{"error shard-leaderless Lease operator-demo/operator-leader---operator-demo-1-normal has no holder since 2026-01-02T03:04:04Z"}},
	"a shard whose Lease has no holder": {func(t *testing.T, c cluster) {
		meshtest.Find[*coordinationv1.Lease](t, c, meshtest.Operator, "operator-leader---operator-demo-1-normal").Spec.HolderIdentity = new("")
	}, []string{"error shard-leaderless shard operator-demo-1-normal has no leader"}},
	"a shard without a Lease": {func(t *testing.T, c cluster) {
		meshtest.Remove[*coordinationv1.Lease](t, c, meshtest.Operator, "operator-leader---operator-demo-1-normal")
	}, []string{"error shard-leaderless shard operator-demo-1-normal has no leader"}},
	"a leader that the manager misses, too": {func(t *testing.T, c cluster) {
		meshtest.Remove[*coordinationv1.Lease](t, c, meshtest.Operator, "operator-leader---operator-demo-1-normal")
		meshtest.SetCondition(config(t, c), v1alpha1.ConditionLeaderMissing, true, v1alpha1.ReasonNoLeader, "shard operator-demo-1-normal has no leader")
	}, []string{"error shard-leaderless NoLeader"}},
	"a member that is not captured": {func(t *testing.T, c cluster) {
		m := &config(t, c).Status.Pods[0]
		m.Capture, m.Message = "", "it is not captured: no cgroup"
	}, []string{"error pod-not-captured pod operator-demo/od-0 on node node-1 is not captured: it is not captured: no cgroup"}},
	"a member that just started": {func(t *testing.T, c cluster) {
		config(t, c).Status.Pods[0].Capture = ""
		pod(t, c, meshtest.Operator, "od-0").CreationTimestamp = metav1.NewTime(meshtest.Now.Add(-time.Second))
	}, nil},
	"a member that the condition names": {func(t *testing.T, c cluster) {
		config(t, c).Status.Pods[0].Capture = ""
		meshtest.SetCondition(config(t, c), v1alpha1.ConditionDegraded, true, v1alpha1.ReasonNotCaptured, "pod od-0: it is not captured")
	}, []string{"error operator-degraded NotCaptured: pod od-0"}},
	"a pod that was not admitted": {func(_ *testing.T, c cluster) {
		p := meshtest.Pod("other", "p", "node-1")
		p.Labels = map[string]string{v1alpha1.EnableProxyLabel: "true"}
		c.Add(p)
	}, []string{"error pod-not-admitted pod other/p"}},
	"a pod outside that holds the lock": {func(t *testing.T, c cluster) {
		c.Add(meshtest.Pod(meshtest.Operator, "od-old", "node-1"))
		config(t, c).Status.Locks[0].HeldByMesh = false
		meshtest.Find[*coordinationv1.Lease](t, c, meshtest.Operator, "operator-leader").Spec.HolderIdentity = new("od-old_77")
	}, []string{"warning lock-outside pod od-old, which lacks label ctrlmesh.kusionstack.io/enable-proxy, holds lock operator-demo/operator-leader"}},
	"a stranger that holds the lock": {func(t *testing.T, c cluster) {
		config(t, c).Status.Locks[0].HeldByMesh = false
		meshtest.Find[*coordinationv1.Lease](t, c, meshtest.Operator, "operator-leader").Spec.HolderIdentity = new("laptop")
	}, []string{`warning lock-outside "laptop" holds lock operator-demo/operator-leader`}},
	"unreadable Leases": {func(_ *testing.T, c cluster) {
		c.Forbidden = func(list client.ObjectList) error {
			if _, leases := list.(*coordinationv1.LeaseList); !leases {
				return nil
			}
			return apierrors.NewForbidden(schema.GroupResource{Resource: "leases"}, "", errors.New("no"))
		}
	}, []string{"unknown unread Leases of operators cannot be read: in namespace operator-demo"}},
	"no mesh": {func(_ *testing.T, c cluster) { c.Objects = nil }, []string{"error mesh-missing ctrlmesh-system"}},
}

func settings(text string) *corev1.ConfigMap {
	return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: mesh, Name: platform.ConfigMap}, Data: map[string]string{platform.Key: text}}
}

func TestPlantedFaultsAreFound(t *testing.T) {
	for name, fault := range faults {
		t.Run(name, func(t *testing.T) {
			c := meshtest.Healthy(t)
			fault.plant(t, c)
			requireFindings(t, fault.finds, checked(t, c))
		})
	}
}

// requireFindings requires exactly these findings, each by severity, kind and a part of its text.
func requireFindings(t *testing.T, want []string, r Report) {
	t.Helper()
	require.Len(t, r.Findings, len(want), "%+v", r.Findings)
	require.Equal(t, len(want) == 0, r.Healthy)
	for i, w := range want {
		parts := strings.SplitN(w, " ", 3)
		f := r.Findings[i]
		assert.Equal(t, parts[:2], []string{string(f.Severity), f.ID})
		if len(parts) == 3 {
			assert.Contains(t, f.Found, parts[2])
		}
		assert.NotEmpty(t, f.Do)
		requireSection(t, f.Docs)
	}
}

// requireSection requires that a file of the repository has the heading of an anchor.
func requireSection(t *testing.T, link string) {
	t.Helper()
	file, anchor, ok := strings.Cut(link, "#")
	require.True(t, ok, link)
	require.True(t, docs.Anchors(t, filepath.Join("../../../..", file))[anchor], "no such section: %s", link)
}

func TestFaultsBeforeTheInstallationAreFound(t *testing.T) {
	for name, fault := range map[string]struct {
		plant func(*testing.T, cluster)
		finds []string
	}{
		"nothing":                          {func(*testing.T, cluster) {}, nil},
		"an old Kubernetes":                {func(_ *testing.T, c cluster) { c.Kubernetes = "v1.29.9" }, []string{"error kubernetes-version v1.29.9 is too old"}},
		"a Kubernetes that was not tested": {func(_ *testing.T, c cluster) { c.Kubernetes = "v1.33.1" }, []string{"warning kubernetes-version v1.33.1"}},
		"a Kubernetes of a vendor":         {func(_ *testing.T, c cluster) { c.Kubernetes = "v1.37.0-gke.12" }, nil},
		"a later Kubernetes":               {func(_ *testing.T, c cluster) { c.Kubernetes = "v1.38.0" }, []string{"warning kubernetes-version v1.38.0"}},
		"an unknown Kubernetes":            {func(_ *testing.T, c cluster) { c.Kubernetes = "main" }, []string{"unknown kubernetes-version main"}},
		"no permission": {func(_ *testing.T, c cluster) {
			c.MayCreate = func(resource string) bool { return resource != "daemonsets" && resource != "namespaces" }
		}, []string{"error permission-missing you may not create namespaces, daemonsets.apps in namespace ctrlmesh-system"}},
		"definitions of an old version": {func(t *testing.T, c cluster) {
			crd := meshtest.Find[*apiextensionsv1.CustomResourceDefinition](t, c, "", "circuitbreakers.ctrlmesh.kusionstack.io")
			crd.Spec.Versions[0].Name = "v1alpha0"
		}, []string{"error crd-old circuitbreakers.ctrlmesh.kusionstack.io"}},
		"no definitions": {func(_ *testing.T, c cluster) {
			c.Objects = slices.DeleteFunc(c.Objects, func(o client.Object) bool {
				_, is := o.(*apiextensionsv1.CustomResourceDefinition)
				return is
			})
		}, nil},
		"a restricted namespace": {func(t *testing.T, c cluster) {
			meshtest.Find[*corev1.Namespace](t, c, "", mesh).Labels[privileged] = "baseline"
		}, []string{"error namespace-restricted level baseline"}},
		"an old kernel": {func(t *testing.T, c cluster) {
			meshtest.Find[*corev1.Node](t, c, "", "node-1").Status.NodeInfo.KernelVersion = "5.10.0-28-amd64"
		}, []string{"warning kernel-version node node-1 has Linux 5.10.0-28-amd64"}},
		"a node with Windows": {func(t *testing.T, c cluster) {
			info := &meshtest.Find[*corev1.Node](t, c, "", "node-1").Status.NodeInfo
			info.OperatingSystem, info.KernelVersion = "windows", "10.0.17763.5329"
		}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			c := meshtest.Healthy(t)
			fault.plant(t, c)
			s, err := c.Reader(t).Read(t.Context(), PreParts(mesh)...)
			require.NoError(t, err)
			requireFindings(t, fault.finds, RunPre(s))
		})
	}
}

// The names of what is checked are those of the manifests.
func TestExpectedNamesAreThoseOfTheManifests(t *testing.T) {
	var mutating, validating, policies, bindings, webhooks []string
	for _, o := range meshtest.Healthy(t).Objects {
		switch o := o.(type) {
		case *admissionv1.MutatingWebhookConfiguration:
			mutating = append(mutating, o.Name)
			for _, w := range o.Webhooks {
				webhooks = append(webhooks, w.Name)
			}
		case *admissionv1.ValidatingWebhookConfiguration:
			validating = append(validating, o.Name)
			for _, w := range o.Webhooks {
				webhooks = append(webhooks, w.Name)
			}
		case *admissionv1.ValidatingAdmissionPolicy:
			policies = append(policies, o.Name)
		case *admissionv1.ValidatingAdmissionPolicyBinding:
			bindings = append(bindings, o.Name)
		}
	}
	require.ElementsMatch(t, mutatingNames, mutating)
	require.ElementsMatch(t, validatingNames, validating)
	require.ElementsMatch(t, policyNames, policies)
	require.ElementsMatch(t, policyNames, bindings)
	require.ElementsMatch(t, slices.Concat(mutatingWebhooks, mutatingDialectWebhooks, validatingWebhooks, validatingDialectWebhooks), webhooks)
}
