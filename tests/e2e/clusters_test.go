package e2e

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/intstr"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/retry"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/manager/label"
	"github.com/ctrlmesh/ctrlmesh/tests/audit"
	"github.com/ctrlmesh/ctrlmesh/tests/operators/fleet/fleetv1"
)

// fleetName is the name of the operator's workload and account.
const fleetName = "fleet"

// testClusters divides an operator that manages two clusters behind one apiserver. One of them is
// handed over and back, and is away for a while.
func testClusters(t *testing.T) {
	if _, err := os.Stat(filepath.Join(cluster.Root, ".run", "kubeconfig")); err != nil {
		t.Skip("only the cluster of tests/cluster can be given others, and there is another")
	}
	home := namespace(t, "e2e-clusters")
	members := []*memberCluster{startMember(t, "member1"), startMember(t, "member2")}
	gateway(t, home, members)
	for _, m := range members {
		m.prepare(t, home)
	}
	listClusters(t, home, members)
	create(t, &meshv1alpha1.ShardingConfig{
		ObjectMeta: metav1.ObjectMeta{Namespace: home, Name: "root"},
		Spec: meshv1alpha1.ShardingConfigSpec{
			Controller: &meshv1alpha1.ControllerConfig{LeaderElectionName: fleetv1.Lock},
			Clusters:   []meshv1alpha1.ClusterPath{{PathPrefix: fleetv1.ClusterPaths}},
			Root: &meshv1alpha1.RootConfig{
				Prefix: "part", TargetStatefulSet: fleetName, Key: meshv1alpha1.KeyCluster, OnChange: meshv1alpha1.OnChangeRelist,
				Auto:             &meshv1alpha1.AutoConfig{ShardingSize: 2, EveryShardReplicas: 1},
				ResourceSelector: listing("clusters." + fleetv1.Group),
			},
		},
	})
	fleet(t, home, 2)
	r := root{home}
	r.settles(t, 2)
	owner := func(m *memberCluster) string {
		t.Helper()
		return m.work(t)
	}
	owner(members[0])
	owner(members[1])

	// Without the names of the clusters, hashes decide, and the status says how to change that.
	until(t, "the status to name the missing permission", func(context.Context) error {
		w := r.config(t).Status.Root.Weighing
		return orElse(strings.Contains(w, "may not list clusters."+fleetv1.Group+": kubectl create clusterrole"), w)
	})
	permitToList(t, home)
	until(t, "each shard to own a cluster", func(context.Context) error {
		root := r.config(t).Status.Root
		for _, s := range root.Shards {
			scope, err := sharding.Parse(s.Held)
			if err != nil {
				return err
			}
			if scope.Owns(members[0].name) == scope.Owns(members[1].name) {
				return fmt.Errorf("%s owns both or none; %+v", s.Name, root)
			}
		}
		return nil
	})
	r.settles(t, 2)
	require.NotEqual(t, owner(members[0]), owner(members[1]))
	until(t, "the method", func(context.Context) error {
		return orElse(r.config(t).Status.Method == string(meshv1alpha1.MethodFilter), "it is "+r.config(t).Status.Method)
	})

	// Both clusters are the first shard's, and one is handed back.
	size := func(n int32) func(*meshv1alpha1.ShardingConfigSpec) {
		return func(spec *meshv1alpha1.ShardingConfigSpec) { spec.Root.Auto.ShardingSize = n }
	}
	r.change(t, 2, size(1))
	require.Equal(t, owner(members[0]), owner(members[1]))
	r.change(t, 2, size(2))
	require.NotEqual(t, owner(members[0]), owner(members[1]))

	// A cluster that is away holds up no other.
	members[0].end()
	owner(members[1])
	members[0].start(t)
	owner(members[0])

	for _, m := range members {
		writers := m.writers(t, home)
		require.NotEmpty(t, writers)
		require.LessOrEqual(t, len(writers), 4, never+": the writers of %s in turn: %v", m.name, writers)
	}
}

// fleet runs the operator.
func fleet(t *testing.T, home string, replicas int32) {
	t.Helper()
	labels := map[string]string{"app": fleetName}
	template := corev1.PodTemplateSpec{
		ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"app": fleetName, meshv1alpha1.EnableProxyLabel: "true"}},
		Spec: corev1.PodSpec{
			ServiceAccountName: fleetName, TerminationGracePeriodSeconds: new(int64(5)),
			Containers: []corev1.Container{{
				Name: fleetName, Image: "localhost/ctrlmesh/fleet:dev", ImagePullPolicy: corev1.PullIfNotPresent,
				Env: []corev1.EnvVar{{Name: "POD_NAMESPACE", Value: home}},
			}},
		},
	}
	owners, err := cluster.OwnedBy(t.Context(), home)
	require.NoError(t, err)
	subject := []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: home, Name: fleetName}}
	create(t,
		&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: home, Name: fleetName}},
		&rbacv1.ClusterRole{
			ObjectMeta: metav1.ObjectMeta{Name: home, OwnerReferences: owners},
			Rules: []rbacv1.PolicyRule{
				{APIGroups: []string{fleetv1.Group}, Resources: []string{"clusters"}, Verbs: []string{"get", "list", "watch"}},
				{APIGroups: []string{fleetv1.GatewayGroup}, Resources: []string{"clusters/proxy"}, Verbs: []string{"*"}},
				{APIGroups: []string{"coordination.k8s.io"}, Resources: []string{"leases"}, Verbs: []string{"*"}},
			},
		},
		&rbacv1.ClusterRoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: home, OwnerReferences: owners},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: home}, Subjects: subject,
		},
		&appsv1.StatefulSet{ObjectMeta: metav1.ObjectMeta{Namespace: home, Name: fleetName}, Spec: appsv1.StatefulSetSpec{
			Replicas: &replicas, Selector: &metav1.LabelSelector{MatchLabels: labels}, Template: template, PodManagementPolicy: appsv1.ParallelPodManagement,
		}})
}

// permitToList lets the manager list the clusters, as the status says.
func permitToList(t *testing.T, home string) {
	t.Helper()
	owners, err := cluster.OwnedBy(t.Context(), home)
	require.NoError(t, err)
	create(t, &rbacv1.ClusterRole{
		ObjectMeta: metav1.ObjectMeta{Name: home + "-list", OwnerReferences: owners, Labels: map[string]string{label.AggregateLabel: "true"}},
		Rules:      []rbacv1.PolicyRule{{APIGroups: []string{fleetv1.Group}, Resources: []string{"clusters"}, Verbs: []string{"list"}}},
	})
}

// memberCluster is another cluster, with an apiserver of its own.
type memberCluster struct {
	name   string
	end    func()
	client kubernetes.Interface // through the gateway
	round  int
}

// startMember starts the apiserver of another cluster, which ends with the test.
func startMember(t *testing.T, name string) *memberCluster {
	t.Helper()
	m := &memberCluster{name: name}
	m.start(t)
	config := rest.CopyConfig(cluster.Config)
	config.Host += strings.Replace(fleetv1.ClusterPaths, "*", name, 1)
	var err error
	m.client, err = kubernetes.NewForConfig(config)
	require.NoError(t, err)
	return m
}

func (m *memberCluster) start(t *testing.T) {
	t.Helper()
	run := func(ctx context.Context, do string) error {
		out, err := exec.CommandContext(ctx, filepath.Join(cluster.Root, "tests", "cluster", "node.sh"), do, m.name).CombinedOutput()
		if err != nil {
			err = fmt.Errorf("%w: %s", err, out)
		}
		return err
	}
	require.NoError(t, run(t.Context(), "start"))
	m.end = once(t, func(ctx context.Context) error { return run(ctx, "stop") })
}

// address returns where the member's apiserver is, beside that of the cluster itself.
func (m *memberCluster) address(t *testing.T) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "bash", "-c", `. "$0/tests/cluster/lib.sh" && endpoint "$(primary member "$1")" 6443`, cluster.Root, m.name).Output()
	require.NoError(t, err)
	return "https://" + strings.TrimSpace(string(out))
}

// prepare permits the operator to work in the cluster, and makes jobs there.
func (m *memberCluster) prepare(t *testing.T, home string) {
	t.Helper()
	until(t, m.name+" through the gateway", func(ctx context.Context) error {
		_, err := m.client.RbacV1().ClusterRoleBindings().Create(ctx, &rbacv1.ClusterRoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: home},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin"},
			Subjects:   []rbacv1.Subject{{Kind: rbacv1.UserKind, APIGroup: rbacv1.GroupName, Name: audit.ServiceAccount(home, fleetName)}},
		}, metav1.CreateOptions{})
		return err
	})
	until(t, "a namespace of "+m.name, func(ctx context.Context) error {
		_, err := m.client.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: home}}, metav1.CreateOptions{})
		return err
	})
	for i := range 5 {
		_, err := m.client.CoreV1().ConfigMaps(home).Create(t.Context(), &corev1.ConfigMap{
			ObjectMeta: metav1.ObjectMeta{Namespace: home, Name: fmt.Sprint("job-", i), Labels: map[string]string{fleetv1.Label: "", "of": home}},
			Data:       map[string]string{fleetv1.Want: "begin"},
		}, metav1.CreateOptions{})
		require.NoError(t, err)
	}
}

// work has something done in the cluster, and returns the pod that did it.
func (m *memberCluster) work(t *testing.T) (by string) {
	t.Helper()
	m.round++
	want := fmt.Sprint("round ", m.round)
	jobs := func(ctx context.Context) ([]corev1.ConfigMap, error) {
		list, err := m.client.CoreV1().ConfigMaps(metav1.NamespaceAll).List(ctx, metav1.ListOptions{LabelSelector: fleetv1.Label})
		if err != nil {
			return nil, err
		}
		return list.Items, nil
	}
	until(t, "the jobs of "+m.name, func(ctx context.Context) error {
		all, err := jobs(ctx)
		for i := range all {
			err = retry.RetryOnConflict(retry.DefaultBackoff, func() error {
				job, err := m.client.CoreV1().ConfigMaps(all[i].Namespace).Get(ctx, all[i].Name, metav1.GetOptions{})
				if err != nil {
					return err
				}
				job.Data[fleetv1.Want] = want
				_, err = m.client.CoreV1().ConfigMaps(job.Namespace).Update(ctx, job, metav1.UpdateOptions{})
				return err
			})
			if err != nil {
				return err
			}
		}
		return err
	})
	until(t, "the work in "+m.name, func(ctx context.Context) error {
		all, err := jobs(ctx)
		if err != nil {
			return err
		}
		by = all[0].Data[fleetv1.By]
		for _, job := range all {
			if job.Data[fleetv1.Done] != want || job.Data[fleetv1.By] != by {
				return fmt.Errorf("%s: %v, beside one by %s", job.Name, job.Data, by)
			}
		}
		return nil
	})
	return by
}

// writers returns the pods of the operator that wrote in the cluster, in turn, by its audit log.
func (m *memberCluster) writers(t *testing.T, home string) (in []string) {
	t.Helper()
	log, err := os.Open(filepath.Join(cluster.Root, ".run", "audit-"+m.name+".log"))
	require.NoError(t, err)
	defer log.Close()
	for lines := bufio.NewReader(log); ; {
		line, err := lines.ReadBytes('\n')
		if err != nil {
			return in // the last one may be half written
		}
		var e auditv1.Event
		require.NoError(t, json.Unmarshal(line, &e))
		if e.User.Username != audit.ServiceAccount(home, fleetName) || e.Verb != "update" || e.Stage != auditv1.StageResponseComplete || e.ResponseStatus.Code != 200 {
			continue
		}
		if len(in) == 0 || in[len(in)-1] != e.UserAgent {
			in = append(in, e.UserAgent)
		}
	}
}

// listClusters has the apiserver list the clusters.
func listClusters(t *testing.T, home string, members []*memberCluster) {
	t.Helper()
	owners, err := cluster.OwnedBy(t.Context(), home)
	require.NoError(t, err)
	crd := &apiextensionsv1.CustomResourceDefinition{
		ObjectMeta: metav1.ObjectMeta{Name: "clusters." + fleetv1.Group, OwnerReferences: owners},
		Spec: apiextensionsv1.CustomResourceDefinitionSpec{
			Group: fleetv1.Group, Scope: apiextensionsv1.ClusterScoped,
			Names: apiextensionsv1.CustomResourceDefinitionNames{Plural: "clusters", Singular: "cluster", Kind: "Cluster", ListKind: "ClusterList"},
			Versions: []apiextensionsv1.CustomResourceDefinitionVersion{{
				Name: fleetv1.Version, Served: true, Storage: true,
				Schema: &apiextensionsv1.CustomResourceValidation{OpenAPIV3Schema: &apiextensionsv1.JSONSchemaProps{Type: "object"}},
			}},
		},
	}
	until(t, "the kind of clusters", func(ctx context.Context) error { return cluster.Create(ctx, crd) }) // one of another run may not be gone yet
	for _, m := range members {
		listed := &unstructured.Unstructured{}
		listed.SetGroupVersionKind(schema.GroupVersionKind{Group: fleetv1.Group, Version: fleetv1.Version, Kind: "Cluster"})
		listed.SetName(m.name)
		until(t, "the list of clusters", func(ctx context.Context) error { return cluster.Create(ctx, listed) })
	}
}

// gateway runs the aggregated API that leads to the members. It is registered last and ends first: the
// deletion of namespaces waits for every registered API.
func gateway(t *testing.T, home string, members []*memberCluster) {
	t.Helper()
	pki := func(name string) []byte {
		b, err := os.ReadFile(filepath.Join(cluster.Root, ".run", "pki", name))
		require.NoError(t, err)
		return b
	}
	labels := map[string]string{"app": "gateway"}
	var args []string
	for _, m := range members {
		args = append(args, "-member="+m.name+"="+m.address(t))
	}
	create(t,
		&corev1.Secret{
			ObjectMeta: metav1.ObjectMeta{Namespace: home, Name: "front-proxy"},
			Data:       map[string][]byte{"ca.crt": pki("ca.crt"), "tls.crt": pki("front-proxy-client.crt"), "tls.key": pki("front-proxy-client.key")},
		},
		&corev1.Service{
			ObjectMeta: metav1.ObjectMeta{Namespace: home, Name: "gateway"},
			Spec:       corev1.ServiceSpec{Selector: labels, Ports: []corev1.ServicePort{{Port: 443, TargetPort: intstr.FromInt32(8443)}}},
		},
		&corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: home, Name: "gateway", Labels: labels},
			Spec: corev1.PodSpec{
				TerminationGracePeriodSeconds: new(int64(1)),
				Containers: []corev1.Container{{
					Name: "gateway", Image: "localhost/ctrlmesh/gateway:dev", ImagePullPolicy: corev1.PullIfNotPresent, Args: args,
					VolumeMounts:   []corev1.VolumeMount{{Name: "certificates", MountPath: "/certificates"}},
					ReadinessProbe: &corev1.Probe{PeriodSeconds: 1, ProbeHandler: corev1.ProbeHandler{TCPSocket: &corev1.TCPSocketAction{Port: intstr.FromInt32(8443)}}},
				}},
				Volumes: []corev1.Volume{{Name: "certificates", VolumeSource: corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{SecretName: "front-proxy"}}}},
			},
		})
	ready(t, home, "gateway")
	service := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService",
		"metadata": map[string]any{"name": fleetv1.GatewayVersion + "." + fleetv1.GatewayGroup},
		"spec": map[string]any{
			"group": fleetv1.GatewayGroup, "version": fleetv1.GatewayVersion, "groupPriorityMinimum": int64(1000), "versionPriority": int64(1),
			"insecureSkipTLSVerify": true, "service": map[string]any{"namespace": home, "name": "gateway"},
		},
	}}
	require.NoError(t, client.IgnoreNotFound(cluster.Delete(t.Context(), service.DeepCopy()))) // of a run that was interrupted
	create(t, service)
	once(t, func(ctx context.Context) error { return client.IgnoreNotFound(cluster.Delete(ctx, service)) })
	until(t, "the gateway", func(ctx context.Context) error {
		_, err := members[0].client.CoreV1().Namespaces().Get(ctx, metav1.NamespaceDefault, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			err = fmt.Errorf("%s: %w", members[0].name, err)
		}
		return err
	})
}
