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
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

// kinds that users write. Without the mesh they have no effect, and nothing removes their finalizers.
var kinds = []string{"ShardingConfig", "CircuitBreaker", "FaultInjection"}

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
		plural := strings.ToLower(kind) + "s"
		problems = append(problems, problem(found, plural, "run kubectl delete "+plural+" -A --all"))
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
	list := strings.Join(found[:min(named, len(found))], ", ")
	if more := len(found) - named; more > 0 {
		list += fmt.Sprintf(" and %d more", more)
	}
	return fmt.Errorf("%d %s exist (%s): %s", len(found), what, list, remedy)
}

func configurations(ctx context.Context, c client.Reader, kind string) ([]string, error) {
	var list metav1.PartialObjectMetadataList
	list.SetGroupVersionKind(v1alpha1.GroupVersion.WithKind(kind + "List"))
	err := c.List(ctx, &list)
	if meta.IsNoMatchError(err) || apierrors.IsNotFound(err) { // the CRD was deleted already
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("listing %ss: %w", kind, err)
	}
	var found []string
	for _, o := range list.Items {
		found = append(found, o.Namespace+"/"+o.Name)
	}
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
