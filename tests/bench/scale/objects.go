package main

import (
	"context"
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/parallel"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

// writers is how many objects are written at the same time.
const writers = 24

func (s size) node(i int) string      { return fmt.Sprintf("scale-%04d", i%s.nodes) }
func (s size) namespace(c int) string { return fmt.Sprintf("scale-%03d", c) }

// each calls f for each number below n, for some at the same time.
func each(ctx context.Context, n int, f func(i int) error) error {
	numbers := make([]int, n)
	for i := range numbers {
		numbers[i] = i
	}
	return errors.Join(parallel.Each(numbers, writers, func(i int) error {
		if err := ctx.Err(); err != nil {
			return err
		}
		return f(i)
	})...)
}

func (r *run) create(ctx context.Context, o client.Object) error {
	err := r.Create(ctx, o)
	if apierrors.IsAlreadyExists(err) {
		return nil
	}
	return err
}

// populate creates the nodes, an agent's pod on each, and the other pods.
func (r *run) populate(ctx context.Context) error {
	if err := each(ctx, r.nodes, func(i int) error {
		return r.create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: r.node(i)}})
	}); err != nil {
		return fmt.Errorf("creating nodes: %w", err)
	}
	if err := each(ctx, r.nodes, func(i int) error { return r.create(ctx, r.agentPod(i)) }); err != nil {
		return fmt.Errorf("creating the agents' pods: %w", err)
	}
	r.say("created %d nodes", r.nodes)
	if err := each(ctx, r.configs, func(c int) error { return r.createTenant(ctx, c) }); err != nil {
		return fmt.Errorf("creating configurations: %w", err)
	}
	r.say("created %d ShardingConfigs", r.configs)
	if err := each(ctx, r.pods-r.labelled, func(i int) error { return r.create(ctx, r.pod(r.namespace(i%r.configs), "other", i)) }); err != nil {
		return fmt.Errorf("creating pods: %w", err)
	}
	r.say("created %d pods that are not on the mesh", r.pods-r.labelled)
	if err := each(ctx, r.labelled, func(i int) error {
		p := r.pod(r.namespace(i%r.configs), "operator", i)
		p.Labels[meshv1alpha1.EnableProxyLabel] = "true"
		p.Annotations = map[string]string{meshv1alpha1.TrustAnnotation: meshv1alpha1.TrustMesh}
		if err := r.create(ctx, p); err != nil {
			return err
		}
		p.Status = corev1.PodStatus{Phase: corev1.PodRunning, Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}}
		return r.Status().Update(ctx, p)
	}); err != nil {
		return fmt.Errorf("creating pods on the mesh: %w", err)
	}
	r.say("created %d pods on the mesh", r.labelled)
	return nil
}

// createTenant creates a namespace with a configuration. The first have a limit that the pods share.
func (r *run) createTenant(ctx context.Context, c int) error {
	ns := r.namespace(c)
	all := []client.Object{
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: ns}},
		&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "default"}},
		&meshv1alpha1.ShardingConfig{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "operator"}, Spec: r.config(c)},
	}
	if c*r.labelled/r.configs < r.limited {
		all = append(all, breaker(ns))
	}
	for _, o := range all {
		// The manager refuses reviews above a rate.
		if err := kube.UntilWithin(ctx, patience, "the creation of what "+ns+" needs", func(ctx context.Context) error { return r.create(ctx, o) }); err != nil {
			return err
		}
	}
	return nil
}

func (r *run) config(c int) meshv1alpha1.ShardingConfigSpec {
	return meshv1alpha1.ShardingConfigSpec{
		Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "operator"}},
		Limits: []meshv1alpha1.ObjectLimiter{{
			RelateResources: []meshv1alpha1.ResourceGroup{{APIGroups: []string{""}, Resources: []string{"configmaps", "endpoints"}}},
			Selector: &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{
				Key: meshv1alpha1.NamespaceLabel, Operator: metav1.LabelSelectorOpIn, Values: []string{r.namespace(c)},
			}}},
		}},
	}
}

func breaker(namespace string) *meshv1alpha1.CircuitBreaker {
	return &meshv1alpha1.CircuitBreaker{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "shared"},
		Spec: meshv1alpha1.CircuitBreakerSpec{
			Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "operator"}},
			RateLimitings: []meshv1alpha1.Limiting{{
				Name: "writes", Scope: meshv1alpha1.LimitScopeWorkload,
				ResourceRules: []meshv1alpha1.ResourceRule{{APIGroups: []string{"*"}, Resources: []string{"*"}, Verbs: []string{"update"}, Namespaces: []string{"*"}}},
				Bucket:        &meshv1alpha1.Bucket{Burst: 1000, Interval: "1s", Limit: 1000},
			}},
		},
	}
}

func (r *run) agentPod(i int) *corev1.Pod {
	p := r.pod(kube.SystemNamespace, kube.AgentName, i)
	p.Spec.ServiceAccountName = kube.AgentName
	return p
}

func (r *run) pod(namespace, app string, i int) *corev1.Pod {
	controller := true
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: fmt.Sprintf("%s-%d", app, i), Labels: map[string]string{"app": app},
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "StatefulSet", Name: app, UID: types.UID(namespace + app), Controller: &controller}},
		},
		Spec: corev1.PodSpec{NodeName: r.node(i), Containers: []corev1.Container{{Name: "operator", Image: "operator"}}},
	}
}
