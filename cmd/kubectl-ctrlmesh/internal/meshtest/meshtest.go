// Package meshtest has a healthy cluster for tests: the manifests of deploy/, with what a cluster adds
// to them, and an operator of two shards.
package meshtest

import (
	"bufio"
	"bytes"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/apimachinery/pkg/version"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/snapshot"
	"github.com/ctrlmesh/ctrlmesh/manager/inject"
	"github.com/ctrlmesh/ctrlmesh/manager/trust"
)

// Now is the time in the cluster.
var Now = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// SecretText is in the Secrets of the cluster, and must be in no output.
const SecretText = "the-key-of-the-mesh"

// Operator is the namespace and the name of the root, of its lock's prefix and of its StatefulSet.
const Operator = "operator-demo"

// Version is the version of the manager and the agents.
const Version = "v0.3.1"

// Cluster is the objects of a cluster. A test changes them before it connects.
type Cluster struct {
	Objects []client.Object
	// Kubernetes is the version of the apiserver.
	Kubernetes string
	// Unreachable is the error of all requests; nil if there is none.
	Unreachable error
	// Forbidden returns the error of a list; nil if it is permitted. It may be nil.
	Forbidden func(client.ObjectList) error
	// MayCreate reports whether the user may create or change a resource.
	MayCreate func(resource string) bool
	// ManagerMay reports whether the manager may list a resource. If it is nil, the user may not ask.
	ManagerMay func(resource string) bool
	// Refuse returns the error of a write; nil if it is permitted. If Refuse is nil, no write is. Otherwise
	// all readers share what was written, and later changes of Objects have no effect.
	Refuse func(verb string, o client.Object) error
	// Logs returns logs of pods, in place of the apiserver; nil: no pod has any.
	Logs func(ctx context.Context, namespace, pod string, options *corev1.PodLogOptions) (io.ReadCloser, error)
	// Metrics returns metrics of pods, in place of the apiserver; nil: no pod has any.
	Metrics func(ctx context.Context, pod *corev1.Pod) (io.ReadCloser, error)
	// Clock returns the time at the apiserver; nil: it is always Now.
	Clock func() time.Time
	// Written are the writes of the reader, without dry runs: verb, kind and name.
	Written []string
	// Advance changes the cluster before each snapshot is read. It may be nil.
	Advance func(client.Client)

	shared client.WithWatch
}

// Healthy returns a cluster in which nothing is wrong.
func Healthy(t testing.TB) *Cluster {
	t.Helper()
	c := &Cluster{Kubernetes: "v1.36.3", MayCreate: func(string) bool { return true }}
	c.install(t)
	c.run()
	c.certificates(t)
	c.operator(t)
	return c
}

// Add adds objects.
func (c *Cluster) Add(objects ...client.Object) { c.Objects = append(c.Objects, objects...) }

// Find returns an object, which the test may change.
func Find[O client.Object](t testing.TB, c *Cluster, namespace, name string) O {
	t.Helper()
	for _, o := range c.Objects {
		if found, ok := o.(O); ok && o.GetNamespace() == namespace && o.GetName() == name {
			return found
		}
	}
	require.FailNow(t, "no such object", "%T %s/%s", *new(O), namespace, name)
	return *new(O)
}

// Remove removes an object.
func Remove[O client.Object](t testing.TB, c *Cluster, namespace, name string) {
	t.Helper()
	gone := client.Object(Find[O](t, c, namespace, name))
	c.Objects = slices.DeleteFunc(c.Objects, func(o client.Object) bool { return o == gone })
}

// Reader returns a reader of the cluster.
func (c *Cluster) Reader(t testing.TB) snapshot.Reader {
	t.Helper()
	cluster := c.shared
	if cluster == nil || c.Refuse == nil {
		scheme, err := snapshot.NewScheme()
		require.NoError(t, err)
		cluster = fake.NewClientBuilder().WithScheme(scheme).WithObjects(c.Objects...).Build()
		c.shared = cluster
	}
	user := interceptor.NewClient(cluster, interceptor.Funcs{
		List: func(ctx context.Context, next client.WithWatch, list client.ObjectList, opts ...client.ListOption) error {
			if c.Forbidden != nil {
				if err := c.Forbidden(list); err != nil {
					return err
				}
			}
			return next.List(ctx, list, opts...)
		},
		Create: func(ctx context.Context, next client.WithWatch, o client.Object, opts ...client.CreateOption) error {
			if review, ok := o.(*authorizationv1.SelfSubjectAccessReview); ok {
				review.Status.Allowed = c.MayCreate(review.Spec.ResourceAttributes.Resource)
				return nil
			}
			if review, ok := o.(*authorizationv1.SubjectAccessReview); ok {
				if c.ManagerMay == nil {
					return apierrors.NewForbidden(schema.GroupResource{Group: "authorization.k8s.io", Resource: "subjectaccessreviews"}, "", errors.New("the user may not create them"))
				}
				review.Status.Allowed = c.ManagerMay(review.Spec.ResourceAttributes.Resource)
				return nil
			}
			dry := len((&client.CreateOptions{}).ApplyOptions(opts).DryRun) > 0
			return c.write("create", o, dry, func() error { return next.Create(ctx, o, opts...) })
		},
		Patch: func(ctx context.Context, next client.WithWatch, o client.Object, patch client.Patch, opts ...client.PatchOption) error {
			dry := len((&client.PatchOptions{}).ApplyOptions(opts).DryRun) > 0
			return c.write("patch", o, dry, func() error { return next.Patch(ctx, o, patch, opts...) })
		},
		Delete: func(ctx context.Context, next client.WithWatch, o client.Object, opts ...client.DeleteOption) error {
			dry := len((&client.DeleteOptions{}).ApplyOptions(opts).DryRun) > 0
			return c.write("delete", o, dry, func() error { return next.Delete(ctx, o, opts...) })
		},
	})
	return snapshot.Reader{
		Client: user, Namespace: snapshot.DefaultNamespace, Logs: c.Logs, Metrics: c.Metrics, Now: c.now,
		Resources: func() ([]*metav1.APIResourceList, error) { return served, c.Unreachable },
		Version: func() (*version.Info, error) {
			if c.Advance != nil {
				c.Advance(cluster)
			}
			return &version.Info{GitVersion: c.Kubernetes}, c.Unreachable
		},
	}
}

func (c *Cluster) now() time.Time {
	if c.Clock == nil {
		return Now
	}
	return c.Clock()
}

// served are resources that the apiserver serves.
var served = []*metav1.APIResourceList{
	{GroupVersion: "v1", APIResources: []metav1.APIResource{
		{Name: "configmaps", SingularName: "configmap", ShortNames: []string{"cm"}, Kind: "ConfigMap", Namespaced: true},
		{Name: "namespaces", SingularName: "namespace", ShortNames: []string{"ns"}, Kind: "Namespace"},
		{Name: "pods", SingularName: "pod", ShortNames: []string{"po"}, Kind: "Pod", Namespaced: true},
		{Name: "pods/exec", Kind: "PodExecOptions", Namespaced: true},
		{Name: "pods/status", Kind: "Pod", Namespaced: true},
	}},
	{GroupVersion: "coordination.k8s.io/v1", APIResources: []metav1.APIResource{{Name: "leases", SingularName: "lease", Kind: "Lease", Namespaced: true}}},
	{GroupVersion: "rbac.authorization.k8s.io/v1", APIResources: []metav1.APIResource{{Name: "clusterroles", SingularName: "clusterrole", Kind: "ClusterRole"}}},
	{GroupVersion: "ctrlmesh.kusionstack.io/v1alpha1", APIResources: []metav1.APIResource{
		{Name: "shardingconfigs", SingularName: "shardingconfig", Kind: "ShardingConfig", Namespaced: true, Verbs: metav1.Verbs{"get", "list"}},
		{Name: "shardingconfigs/status", Kind: "ShardingConfig", Namespaced: true, Verbs: metav1.Verbs{"get"}},
	}},
	{GroupVersion: "example.com/v1", APIResources: []metav1.APIResource{
		{Name: "foos", SingularName: "foo", ShortNames: []string{"fo"}, Kind: "Foo", Namespaced: true},
		{Name: "foos/status", Kind: "Foo", Namespaced: true},
		{Name: "tallies", SingularName: "tally", Kind: "Tally", Namespaced: true},
	}},
}

// write does a write of the reader, if it is permitted.
func (c *Cluster) write(verb string, o client.Object, dry bool, do func() error) error {
	if c.Refuse == nil {
		return errors.New("the command writes nothing")
	}
	if err := c.Refuse(verb, o); err != nil {
		return err
	}
	if !dry {
		c.Written = append(c.Written, fmt.Sprintf("%s %T %s", verb, o, o.GetName()))
	}
	return do()
}

// install adds the manifests.
func (c *Cluster) install(t testing.TB) {
	t.Helper()
	objects, err := manifests()
	require.NoError(t, err)
	for _, o := range objects {
		copied, ok := o.DeepCopyObject().(client.Object)
		require.True(t, ok)
		c.Add(copied)
	}
}

// manifests returns the objects of the manifests. The callers share them.
var manifests = sync.OnceValues(func() (out []client.Object, err error) {
	const deploy = "../../../../deploy" // from the packages beside this one
	scheme, err := snapshot.NewScheme()
	if err != nil {
		return nil, err
	}
	decoder := serializer.NewCodecFactory(scheme).UniversalDeserializer()
	var files []string
	for _, pattern := range []string{"crd/*_*.yaml", "manager/*.yaml", "agent/*.yaml", "default/namespace.yaml"} {
		found, err := filepath.Glob(filepath.Join(deploy, pattern))
		if err != nil {
			return nil, err
		}
		if len(found) == 0 {
			return nil, fmt.Errorf("no manifests match %s", pattern)
		}
		files = append(files, found...)
	}
	for _, file := range files {
		if filepath.Base(file) == "kustomization.yaml" {
			continue
		}
		objects, err := decode(decoder, file)
		if err != nil {
			return nil, fmt.Errorf("decoding %s: %w", file, err)
		}
		out = append(out, objects...)
	}
	return out, nil
})

// decode returns the objects of a file.
func decode(decoder runtime.Decoder, file string) (out []client.Object, err error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	for reader := utilyaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(text))); ; {
		document, err := reader.Read()
		if errors.Is(err, io.EOF) {
			return out, nil
		}
		if err != nil {
			return nil, err
		}
		decoded, _, err := decoder.Decode(document, nil, nil)
		if err != nil {
			return nil, err
		}
		o, ok := decoded.(client.Object)
		if !ok {
			return nil, fmt.Errorf("%T is no object", decoded)
		}
		out = append(out, o)
	}
}

// run adds nodes, pods of the mesh, and the Lease of its leader.
func (c *Cluster) run() {
	for _, o := range c.Objects {
		switch o := o.(type) {
		case *appsv1.Deployment:
			o.Spec.Template.Spec.Containers[0].Image = "registry.example.com/ctrlmesh/manager:" + Version
			o.Status = appsv1.DeploymentStatus{Replicas: 2, ReadyReplicas: 2}
		case *appsv1.DaemonSet:
			o.Spec.Template.Spec.Containers[0].Image = "registry.example.com/ctrlmesh/agent:" + Version
			o.Status = appsv1.DaemonSetStatus{DesiredNumberScheduled: 2, CurrentNumberScheduled: 2, NumberReady: 2}
		}
	}
	for _, node := range []string{"node-1", "node-2"} {
		c.Add(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node}, Status: corev1.NodeStatus{
			NodeInfo: corev1.NodeSystemInfo{OperatingSystem: "linux", KernelVersion: "6.1.0-13-amd64"},
		}})
		suffix := node[len("node-"):]
		manager := Pod(snapshot.DefaultNamespace, snapshot.Manager+"-"+suffix, node)
		manager.Labels = map[string]string{snapshot.NameLabel: snapshot.Manager}
		manager.Spec.Containers = []corev1.Container{{Name: "manager", Image: "registry.example.com/ctrlmesh/manager:" + Version}}
		agent := Pod(snapshot.DefaultNamespace, snapshot.Agent+"-"+suffix, node)
		agent.Labels = map[string]string{snapshot.NameLabel: snapshot.Agent}
		agent.Spec.Containers = []corev1.Container{{Name: "agent", Image: "registry.example.com/ctrlmesh/agent:" + Version}}
		c.Add(manager, agent)
	}
	c.Add(Lease(snapshot.DefaultNamespace, snapshot.Manager, snapshot.Manager+"-1_0a1b"))
	for _, name := range snapshot.Secrets {
		c.Add(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: snapshot.DefaultNamespace, Name: name}, Data: map[string][]byte{"ca.key": []byte(SecretText)}})
	}
}

// Pod returns a pod that runs and is ready.
func Pod(namespace, name, node string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, UID: types.UID("uid-" + name), CreationTimestamp: metav1.NewTime(Now.Add(-time.Hour))},
		Spec:       corev1.PodSpec{NodeName: node},
		Status: corev1.PodStatus{Phase: corev1.PodRunning, Conditions: []corev1.PodCondition{
			{Type: corev1.PodReady, Status: corev1.ConditionTrue},
		}},
	}
}

// Unready makes a pod not ready.
func Unready(pod *corev1.Pod) { pod.Status.Conditions[0].Status = corev1.ConditionFalse }

// Lease returns a Lease that was renewed two seconds ago.
func Lease(namespace, name, holder string) *coordinationv1.Lease {
	return &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}, Spec: coordinationv1.LeaseSpec{
		HolderIdentity: new(holder), LeaseDurationSeconds: new(int32(15)), RenewTime: new(metav1.NewMicroTime(Now.Add(-2 * time.Second))),
	}}
}

// Certificate returns a certificate in PEM that has existed for some time of its ten years.
func Certificate(t testing.TB, age time.Duration) []byte {
	t.Helper()
	ca, err := trust.NewCA("test", func(*x509.Certificate) {}, Now.Add(-age))
	require.NoError(t, err)
	return ca.Bundle()
}

// certificates adds the CAs that the manager publishes.
func (c *Cluster) certificates(t testing.TB) {
	t.Helper()
	ca := Certificate(t, time.Hour)
	for _, o := range c.Objects {
		switch o := o.(type) {
		case *admissionv1.MutatingWebhookConfiguration:
			for i := range o.Webhooks {
				o.Webhooks[i].ClientConfig.CABundle = ca
			}
		case *admissionv1.ValidatingWebhookConfiguration:
			for i := range o.Webhooks {
				o.Webhooks[i].ClientConfig.CABundle = ca
			}
		}
	}
	c.Add(
		&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: snapshot.DefaultNamespace, Name: meshv1.ManagerCAConfigMap}, Data: map[string]string{meshv1.ManagerCAKey: string(ca)}},
		&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: Operator, Name: inject.MeshBundle, Labels: map[string]string{inject.BundleLabel: "true"}}, Data: map[string]string{"ca.crt": string(ca)}},
	)
}

// Halves are the two halves of the key space.
var Halves = [2]string{"0000000000000000-7fffffffffffffff", "8000000000000000-ffffffffffffffff"}

// operator adds an operator with two shards of one pod each, and a hand-written shard.
func (c *Cluster) operator(t testing.TB) {
	t.Helper()
	root := &v1alpha1.ShardingConfig{
		ObjectMeta: metav1.ObjectMeta{Namespace: Operator, Name: Operator, UID: "uid-of-the-root", Generation: 2},
		Spec: v1alpha1.ShardingConfigSpec{
			Controller: &v1alpha1.ControllerConfig{LeaderElectionName: "operator-leader"},
			Root: &v1alpha1.RootConfig{
				Prefix: Operator, TargetStatefulSet: Operator, Auto: &v1alpha1.AutoConfig{ShardingSize: 2, EveryShardReplicas: 1},
				ResourceSelector: []v1alpha1.ObjectLimiter{{RelateResources: []v1alpha1.ResourceGroup{{APIGroups: []string{"example.com"}, Resources: []string{"foos"}}}}},
			},
		},
		Status: v1alpha1.ShardingConfigStatus{
			ObservedGeneration: 2, Shards: 2, Members: 2, ReadyMembers: 2, Method: "ServerSide", Conditions: ReadyConditions(v1alpha1.ReasonSettled, "2 of 2 members ready in 2 shards"),
			Locks: []v1alpha1.LockStatus{{Namespace: Operator, Name: "operator-leader", Resources: []string{"leases"}, HeldByMesh: true}},
			Root:  &v1alpha1.RootStatus{Handover: "Settled", Skew: "1.02"},
		},
	}
	c.Add(root, Lease(Operator, "operator-leader", v1alpha1.LockIdentityPrefix+Operator+"/"+Operator))
	for i, weight := range []int64{30211, 29102} {
		shard, podName, node := []string{Operator + "-1-normal", Operator + "-2-normal"}[i], []string{"od-0", "od-1"}[i], []string{"node-1", "node-2"}[i]
		pod := Pod(Operator, podName, node)
		pod.Labels = map[string]string{v1alpha1.EnableProxyLabel: "true", v1alpha1.ShardLabel: shard}
		pod.Annotations = map[string]string{v1alpha1.TrustAnnotation: v1alpha1.TrustMesh}
		pod.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "StatefulSet", Name: Operator, Controller: new(true)}}
		root.Status.Root.ChildShardingConfigs = append(root.Status.Root.ChildShardingConfigs, shard)
		root.Status.Root.Assignments = append(root.Status.Root.Assignments, v1alpha1.Assignment{UID: string(pod.UID), Name: podName, Node: node, Shard: shard})
		root.Status.Root.Shards = append(root.Status.Root.Shards, v1alpha1.ShardStatus{
			Name: shard, Held: []string{Halves[i]}, Target: []string{Halves[i]}, Wanted: []string{Halves[i]},
			Namespaces: []int32{412, 398}[i], Weight: weight, Members: 1, ReadyMembers: 1, Leader: podName,
		})
		root.Status.Pods = append(root.Status.Pods, v1alpha1.MemberStatus{Name: podName, Node: node, Capture: v1alpha1.CaptureEBPF, LockHolder: true})
		c.Add(pod, Lease(Operator, "operator-leader---"+shard, podName+"_5c6d"), &v1alpha1.ShardingConfig{
			ObjectMeta: metav1.ObjectMeta{Namespace: Operator, Name: shard, Labels: map[string]string{v1alpha1.RootLabel: Operator}},
			Status:     v1alpha1.ShardingConfigStatus{Lock: "operator-leader---" + shard},
		})
	}
	c.byHand()
}

// byHand adds a hand-written shard with one pod on node-1.
func (c *Cluster) byHand() {
	pod := Pod(Operator, "bh-0", "node-1")
	pod.Labels = map[string]string{v1alpha1.EnableProxyLabel: "true", "app": "by-hand"}
	pod.Annotations = map[string]string{v1alpha1.TrustAnnotation: v1alpha1.TrustMesh}
	selector := func(value string) *metav1.LabelSelector {
		return &metav1.LabelSelector{MatchLabels: map[string]string{"app": value}}
	}
	c.Add(pod, &v1alpha1.ShardingConfig{
		ObjectMeta: metav1.ObjectMeta{Namespace: Operator, Name: "by-hand", UID: "uid-of-by-hand", Generation: 1},
		Spec: v1alpha1.ShardingConfigSpec{Selector: selector("by-hand"), Limits: []v1alpha1.ObjectLimiter{{
			RelateResources: []v1alpha1.ResourceGroup{{APIGroups: []string{""}, Resources: []string{"configmaps"}}}, Selector: selector("a"),
		}}},
		Status: v1alpha1.ShardingConfigStatus{
			ObservedGeneration: 1, Shards: 1, Members: 1, ReadyMembers: 1, Method: "Labels", Conditions: ReadyConditions(v1alpha1.ReasonAllReady, "1 of 1 members ready"),
			Pods: []v1alpha1.MemberStatus{{Name: "bh-0", Node: "node-1", Capture: v1alpha1.CaptureIPTables}},
		},
	})
}

// ReadyConditions returns the conditions of a configuration that is ready.
func ReadyConditions(reason v1alpha1.Reason, message string) []metav1.Condition {
	at := metav1.NewTime(Now.Add(-10 * time.Minute))
	return []metav1.Condition{
		{Type: v1alpha1.ConditionReady, Status: metav1.ConditionTrue, Reason: string(reason), Message: message, LastTransitionTime: at},
		{Type: v1alpha1.ConditionDegraded, Status: metav1.ConditionFalse, Reason: string(v1alpha1.ReasonHealthy), LastTransitionTime: at},
		{Type: v1alpha1.ConditionLeaderMissing, Status: metav1.ConditionFalse, Reason: string(v1alpha1.ReasonLed), LastTransitionTime: at},
	}
}

// SetCondition makes a condition of a configuration true or false.
func SetCondition(c *v1alpha1.ShardingConfig, kind string, is bool, reason v1alpha1.Reason, message string) {
	status := metav1.ConditionFalse
	if is {
		status = metav1.ConditionTrue
	}
	c.Status.Conditions = slices.DeleteFunc(c.Status.Conditions, func(o metav1.Condition) bool { return o.Type == kind })
	c.Status.Conditions = append(c.Status.Conditions, metav1.Condition{Type: kind, Status: status, Reason: string(reason), Message: message, LastTransitionTime: metav1.NewTime(Now.Add(-41 * time.Second))})
}
