// Package removal finds what the removal of the mesh would break.
package removal

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	kridge "github.com/ctrlmesh/ctrlmesh/api/kridge/v1alpha1"
	kruise "github.com/ctrlmesh/ctrlmesh/api/kruise/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/clip"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
)

var shardingConfigs = v1alpha1.GroupVersion.WithKind("ShardingConfig")

// kinds that users write. Without the mesh they have no effect, and nothing removes their finalizers.
var kinds = []schema.GroupVersionKind{
	shardingConfigs, v1alpha1.GroupVersion.WithKind("CircuitBreaker"), v1alpha1.GroupVersion.WithKind("FaultInjection"),
	kridge.GroupVersion.WithKind("ShardingConfig"), kruise.GroupVersion.WithKind("VirtualApp"), kruise.GroupVersion.WithKind("TrafficPolicy"),
}

// named bounds how many objects an error names.
const named = 5

// Check returns an error that says what to do first if configurations or labelled pods exist,
// or agents in the namespace of the mesh still redirect.
func Check(ctx context.Context, c client.Reader, namespace string) error {
	var problems []error
	for _, kind := range kinds {
		found, err := configurations(ctx, c, kind)
		if err != nil {
			return err
		}
		plural := pluralOf(kind)
		remedy := "run kubectl delete " + plural + " -A --all"
		if kind == shardingConfigs {
			remedy += ", after removing the label from pods of hand-written shards: they are refused without"
		}
		problems = append(problems, problem(found, plural, remedy))
	}
	members, err := labelledPods(ctx, c)
	if err != nil {
		return err
	}
	problems = append(problems, problem(members, "labelled pods",
		"remove the label "+v1alpha1.EnableProxyLabel+" from their pod templates, and wait until the pods are replaced"))
	agents, err := redirectingAgents(ctx, c, namespace)
	if err != nil {
		return err
	}
	problems = append(problems, problem(agents, "agents that redirect", "upgrade the release with --set agent.cleanup=true --wait"))
	return errors.Join(problems...)
}

// problem returns an error if objects were found.
func problem(found []string, what, remedy string) error {
	if len(found) == 0 {
		return nil
	}
	slices.Sort(found)
	return fmt.Errorf("%d %s exist (%s): %s", len(found), what, clip.Join(found, named, ", "), remedy)
}

// pluralOf returns the name of a kind's resource for kubectl.
func pluralOf(kind schema.GroupVersionKind) string {
	plural := strings.ToLower(kind.Kind) + "s"
	switch {
	case strings.HasSuffix(kind.Kind, "y"):
		plural = strings.ToLower(strings.TrimSuffix(kind.Kind, "y")) + "ies"
	case kind.Group == kridge.GroupName:
		plural += "." + kind.Group // of two groups with such a kind, kubectl takes the first
	}
	return plural
}

func configurations(ctx context.Context, c client.Reader, kind schema.GroupVersionKind) ([]string, error) {
	var list metav1.PartialObjectMetadataList
	list.SetGroupVersionKind(kind.GroupVersion().WithKind(kind.Kind + "List"))
	err := c.List(ctx, &list)
	if meta.IsNoMatchError(err) || apierrors.IsNotFound(err) { // the CRD was deleted already
		return nil, nil
	}
	if apierrors.IsForbidden(err) && kind.Group != v1alpha1.GroupName { // the dialects are not served
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("listing %s: %w", pluralOf(kind), err)
	}
	found := collect.Map(list.Items, func(o metav1.PartialObjectMetadata) string { return o.Namespace + "/" + o.Name })
	return found, nil
}

func labelledPods(ctx context.Context, c client.Reader) ([]string, error) {
	var pods corev1.PodList
	if err := c.List(ctx, &pods, client.MatchingLabels{v1alpha1.EnableProxyLabel: "true"}); err != nil {
		return nil, fmt.Errorf("listing labelled pods: %w", err)
	}
	var found []string
	for _, pod := range pods.Items {
		if pod.Status.Phase != corev1.PodSucceeded && pod.Status.Phase != corev1.PodFailed {
			found = append(found, pod.Namespace+"/"+pod.Name)
		}
	}
	return found, nil
}

// redirectingAgents returns the agents that do not run as cleaners.
func redirectingAgents(ctx context.Context, c client.Reader, namespace string) ([]string, error) {
	var pods corev1.PodList
	err := c.List(ctx, &pods, client.InNamespace(namespace), client.MatchingLabels{"app.kubernetes.io/name": "ctrlmesh-agent"})
	if err != nil {
		return nil, fmt.Errorf("listing agents: %w", err)
	}
	var found []string
	for _, pod := range pods.Items {
		cleans := slices.ContainsFunc(pod.Spec.Containers, func(c corev1.Container) bool { return slices.Contains(c.Args, "cleanup") })
		if !cleans {
			found = append(found, pod.Namespace+"/"+pod.Name)
		}
	}
	return found, nil
}
