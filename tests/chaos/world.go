package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
	tallyv1 "github.com/ctrlmesh/ctrlmesh/tests/operators/tally/v1"
)

const (
	probeImage   = "localhost/ctrlmesh/probe:dev"
	netImage     = "localhost/busybox:1"
	probeAccount = "probe"
	policyLabel  = "policy" // what configurations select their pods by
)

// patience is how long to wait for what takes seconds on an idle machine.
const patience = 90 * time.Second

// ours marks the namespaces that the suite makes.
var ours = client.MatchingLabels{"app.kubernetes.io/part-of": "ctrlmesh-chaos"}

// world is the cluster under test and what a run keeps of it.
type world struct {
	*kube.Cluster
	nodes []string
	lines *accessLines
	begun time.Time

	members []*member // of the fleet, once there is one
	tenants []string  // of the operator, once there are some
	class   string    // of the operator's objects; empty for all
	stop    func()    // ends the reading of logs
}

func newWorld(ctx context.Context) (*world, error) {
	c, err := kube.Connect(tallyv1.AddToScheme)
	if err != nil {
		return nil, err
	}
	w := &world{Cluster: c, begun: time.Now()}
	if _, err := os.Stat(c.AuditLog()); err != nil {
		return nil, fmt.Errorf("this needs the cluster of tests/cluster, for its audit log: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	if err := kube.Until(ctx, "ctrlmesh to be ready", w.meshReady); err != nil {
		return nil, err
	}
	var nodes corev1.NodeList
	if err := c.List(ctx, &nodes); err != nil {
		return nil, fmt.Errorf("listing nodes: %w", err)
	}
	for _, n := range nodes.Items {
		w.nodes = append(w.nodes, n.Name)
	}
	slices.Sort(w.nodes)
	if len(w.nodes) < 2 {
		return nil, errors.New("this needs two nodes")
	}
	if err := w.sweep(ctx); err != nil {
		return nil, err
	}
	// Logs go when their pods do, so all are read as they are written.
	w.lines = &accessLines{root: c.Root}
	reading, stop := context.WithCancel(context.Background())
	var reader sync.WaitGroup
	reader.Go(func() { w.lines.follow(reading) })
	w.stop = func() { stop(); reader.Wait() }
	return w, nil
}

func (w *world) meshReady(ctx context.Context) error {
	for _, workload := range []client.Object{manager(), agents()} {
		err := w.RolledOut(ctx, workload)
		if client.IgnoreNotFound(err) == nil && err != nil {
			return kube.Never(errors.New("ctrlmesh is not installed (make install)"))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// close removes what the run made, and does not wait for its end.
func (w *world) close() {
	w.stop()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := w.remove(ctx); err != nil {
		w.say("! %v", err)
	}
}

// sweep removes what an interrupted run left.
func (w *world) sweep(ctx context.Context) error {
	if err := w.remove(ctx); err != nil {
		return err
	}
	return kube.Until(ctx, "the end of what an earlier run left", func(ctx context.Context) error {
		var left corev1.NamespaceList
		if err := w.List(ctx, &left, ours); err != nil {
			return err
		}
		if n := len(left.Items); n > 0 {
			return fmt.Errorf("%d namespaces", n)
		}
		return nil
	})
}

func (w *world) remove(ctx context.Context) error {
	var left corev1.NamespaceList
	if err := w.List(ctx, &left, ours); err != nil {
		return fmt.Errorf("looking for namespaces to remove: %w", err)
	}
	for i := range left.Items {
		if err := w.Delete(ctx, &left.Items[i]); client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("removing namespace %s: %w", left.Items[i].Name, err)
		}
	}
	return nil
}

// say tells how far the run has come.
func (w *world) say(format string, args ...any) {
	fmt.Printf("[%6.1f s] %s\n", time.Since(w.begun).Seconds(), fmt.Sprintf(format, args...))
}

// until waits for cond with the patience of a test.
func (w *world) until(ctx context.Context, what string, cond func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	return kube.Until(ctx, what, cond)
}

func manager() *appsv1.Deployment {
	return &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: kube.SystemNamespace, Name: kube.ManagerName}}
}

func agents() *appsv1.DaemonSet {
	return &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: kube.SystemNamespace, Name: kube.AgentName}}
}

// namespace makes a namespace whose name begins with the given one.
func (w *world) namespace(ctx context.Context, name string) (string, error) {
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "chaos-" + name + "-", Labels: ours}}
	if err := w.Create(ctx, ns); err != nil {
		return "", fmt.Errorf("making a namespace: %w", err)
	}
	return ns.Name, nil
}

// home makes a namespace for pods, with a service account that may do everything:
// what keeps it from something is then the mesh.
func (w *world) home(ctx context.Context, name string) (string, error) {
	home, err := w.namespace(ctx, name)
	if err != nil {
		return "", err
	}
	var ns corev1.Namespace
	if err := w.Get(ctx, client.ObjectKey{Name: home}, &ns); err != nil {
		return "", fmt.Errorf("reading namespace %s: %w", home, err)
	}
	return home, w.create(ctx,
		&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: home, Name: probeAccount}},
		&rbacv1.ClusterRoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: home, OwnerReferences: []metav1.OwnerReference{ // it goes with the namespace
				{APIVersion: "v1", Kind: "Namespace", Name: ns.Name, UID: ns.UID},
			}},
			RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin"},
			Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: home, Name: probeAccount}},
		})
}

func (w *world) create(ctx context.Context, objects ...client.Object) error {
	for _, obj := range objects {
		if err := w.Create(ctx, obj); err != nil {
			return fmt.Errorf("making %T %s/%s: %w", obj, obj.GetNamespace(), obj.GetName(), err)
		}
	}
	return nil
}

// shard makes a configuration whose members are the pods of its name in home, under
// a failure policy, and that of ConfigMaps see one namespace, made for it with an
// object in it. It waits until the manager knows: a pod made before would be
// nobody's member.
func (w *world) shard(ctx context.Context, home, name string, policy meshv1alpha1.FailurePolicy) (owns string, err error) {
	if owns, err = w.namespace(ctx, "owned"); err != nil {
		return "", err
	}
	c := &meshv1alpha1.ShardingConfig{
		ObjectMeta: metav1.ObjectMeta{Namespace: home, Name: name},
		Spec: meshv1alpha1.ShardingConfigSpec{
			Selector: &metav1.LabelSelector{MatchLabels: map[string]string{policyLabel: name}},
			Limits: []meshv1alpha1.ObjectLimiter{{
				RelateResources: []meshv1alpha1.ResourceGroup{{APIGroups: []string{""}, Resources: []string{"configmaps"}}},
				Selector:        &metav1.LabelSelector{MatchLabels: map[string]string{meshv1alpha1.NamespaceLabel: owns}},
			}},
			FailurePolicy: policy,
		},
	}
	if err := w.create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: owns, Name: touchedName}}, c); err != nil {
		return "", err
	}
	return owns, w.until(ctx, "the manager to see ShardingConfig "+name, func(ctx context.Context) error {
		if err := w.Get(ctx, client.ObjectKeyFromObject(c), c); err != nil {
			return err
		}
		if s := c.Status; s.ObservedGeneration < c.Generation || s.Stamping == nil || !s.Stamping.Done {
			return errors.New("it has not seen it, or still stamps")
		}
		return nil
	})
}

// pod is one on the mesh, selected by the configuration of a name, captured in a way.
func pod(home, name, config, way, node string, command ...string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: home, Name: name,
			Labels:      map[string]string{meshv1alpha1.EnableProxyLabel: "true", policyLabel: config},
			Annotations: map[string]string{meshv1alpha1.CaptureAnnotation: way},
		},
		Spec: corev1.PodSpec{
			ServiceAccountName: probeAccount, NodeName: node,
			TerminationGracePeriodSeconds: new(int64),
			Containers: []corev1.Container{{
				Name: "main", Image: probeImage, ImagePullPolicy: corev1.PullIfNotPresent, Command: command,
			}},
		},
	}
}

// captureOf says by which way a configuration's members are captured, by name.
func (w *world) captureOf(ctx context.Context, home, config string) (map[string]string, error) {
	c := &meshv1alpha1.ShardingConfig{}
	if err := w.Get(ctx, client.ObjectKey{Namespace: home, Name: config}, c); err != nil {
		return nil, fmt.Errorf("reading ShardingConfig %s: %w", config, err)
	}
	out := map[string]string{}
	for _, m := range c.Status.Pods {
		out[m.Name] = m.Capture
		if m.Capture == "" {
			out[m.Name] = m.Message
		}
	}
	return out, nil
}
