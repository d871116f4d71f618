package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

const (
	batch    = 40 // pods at a time: two nodes take 110 each
	burners  = 1  // per node, of the two that share the machine's processors
	startApp = "starts"
)

var starters = client.MatchingLabels{policyLabel: startApp, "app": startApp}

// starts runs many pods of which the first instruction is a request, on nodes with
// no time for them. None must see more than its shard and none must get round the
// mesh, however late the agent hears of it.
func starts(ctx context.Context, w *world, r *result) error {
	home, err := w.home(ctx, "starts")
	if err != nil {
		return err
	}
	owns, err := w.shard(ctx, home, startApp, meshv1alpha1.FailClosed)
	if err != nil {
		return err
	}
	if err := w.waysUsed(ctx, r, home); err != nil {
		return err
	}
	if err := w.burn(ctx, home); err != nil {
		return err
	}
	for begun := 0; begun < wantStarts; begun += batch {
		if err := w.startBatch(ctx, r, home, owns, begun, min(begun+batch, wantStarts)); err != nil {
			return err
		}
	}
	// What burns must not burn under the other parts.
	if err := w.Delete(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: home}}); err != nil {
		return fmt.Errorf("removing the burners: %w", err)
	}
	return nil
}

// waysUsed keeps a pod in each way, because those that end are soon not told of.
func (w *world) waysUsed(ctx context.Context, r *result, home string) error {
	for _, way := range ways {
		p := pod(home, "keeper-"+way, startApp, way, w.nodes[0], "sleep", "1000000")
		p.Spec.Containers[0].Image = netImage
		if err := w.create(ctx, p); err != nil {
			return err
		}
	}
	return w.until(ctx, "pods to be captured as they asked", func(ctx context.Context) error {
		captured, err := w.captureOf(ctx, home, startApp)
		if err != nil {
			return err
		}
		for _, way := range ways {
			if got := captured["keeper-"+way]; got != way {
				return fmt.Errorf("who asked for %s is captured by %q", way, got)
			}
			r.captured(way)
		}
		return nil
	})
}

// burn keeps the nodes' processors busy, with a share of them that competes.
func (w *world) burn(ctx context.Context, home string) error {
	for _, node := range w.nodes[:2] {
		for i := range burners {
			p := pod(home, fmt.Sprintf("burner-%s-%d", node, i), "", "", node, "sh", "-c", "while :; do :; done")
			p.Labels, p.Annotations = nil, nil // not on the mesh
			p.Spec.Containers[0].Image = netImage
			p.Spec.Containers[0].Resources.Requests = corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("250m")}
			if err := w.create(ctx, p); err != nil {
				return err
			}
		}
	}
	return nil
}

// starter is a pod that asks and ends. It is started anew until it was answered.
func starter(home, name, way, node string) *corev1.Pod {
	const account = "/var/run/secrets/kubernetes.io/serviceaccount/"
	p := pod(home, name, startApp, way, node, "gonet", "get", "-t", "20s", "-token", account+"token", "-ca", account+"ca.crt",
		"https://$(KUBERNETES_SERVICE_HOST):$(KUBERNETES_SERVICE_PORT)/api/v1/configmaps")
	p.Labels["app"] = startApp
	p.Spec.Containers[0].Image = netImage
	p.Spec.RestartPolicy = corev1.RestartPolicyOnFailure
	return p
}

func (w *world) startBatch(ctx context.Context, r *result, home, owns string, from, to int) error {
	begun, err := w.mark()
	if err != nil {
		return err
	}
	var all []string
	for i := from; i < to; i++ {
		// Neighbours in number differ in way and, by threes, in node.
		p := starter(home, fmt.Sprintf("start-%03d", i), ways[i%len(ways)], w.nodes[i/len(ways)%2])
		if err := w.create(ctx, p); err != nil {
			return err
		}
		all = append(all, home+"/"+p.Name)
	}
	var list corev1.PodList
	awaited := w.until(ctx, "the pods to be answered", func(ctx context.Context) error {
		if err := w.List(ctx, &list, client.InNamespace(home), starters); err != nil {
			return err
		}
		var waiting []string
		for _, p := range list.Items {
			if p.Status.Phase != corev1.PodSucceeded {
				waiting = append(waiting, p.Name)
			}
		}
		if len(waiting) > 0 {
			return fmt.Errorf("%d were not: %s, for one", len(waiting), waiting[0])
		}
		return nil
	})
	answered, again := 0, int32(0)
	for i := range list.Items {
		p := &list.Items[i]
		if len(p.Status.ContainerStatuses) > 0 {
			again += p.Status.ContainerStatuses[0].RestartCount
		}
		if p.Status.Phase != corev1.PodSucceeded {
			r.doubt("starts: %s was not answered: %s", p.Name, w.lastWords(p))
			continue
		}
		seen, err := w.namespacesSeen(p)
		switch {
		case err != nil:
			r.doubt("starts: %s: %v", p.Name, err)
		case !slices.Equal(seen, []string{owns}):
			r.doubt("starts: %s (%s) saw %v, not %s alone", p.Name, p.Annotations[meshv1alpha1.CaptureAnnotation], seen, owns)
		default:
			answered++
		}
	}
	requests, err := w.requests(begun, all...)
	if err != nil {
		return err
	}
	if len(requests) < answered {
		r.doubt("starts: %d pods were answered, and the audit log has %d requests", answered, len(requests))
	}
	leaked, err := w.leaks(ctx, requests, nil)
	if err != nil {
		return err
	}
	r.starts += answered
	r.leaked += len(leaked)
	w.say("  %d pods: %d answered, of their own shard alone; %d tries were refused before; %d leaked", to-from, answered, again, len(leaked))
	if err := w.DeleteAllOf(ctx, &corev1.Pod{}, client.InNamespace(home), starters, client.GracePeriodSeconds(0)); err != nil {
		return errors.Join(awaited, fmt.Errorf("deleting pods: %w", err))
	}
	return awaited
}

// namespacesSeen are those of the objects in the list that a starter printed.
func (w *world) namespacesSeen(p *corev1.Pod) ([]string, error) {
	var list metav1.PartialObjectMetadataList
	text, err := w.output(p, "stdout")
	if err != nil {
		return nil, err
	}
	if err := json.Unmarshal([]byte(text), &list); err != nil {
		return nil, fmt.Errorf("reading its list: %w", err)
	}
	var out []string
	for _, item := range list.Items {
		out = append(out, item.Namespace)
	}
	slices.Sort(out)
	return slices.Compact(out), nil
}

// lastWords of a starter that fails.
func (w *world) lastWords(p *corev1.Pod) string {
	text, err := w.output(p, "stderr")
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return lines[len(lines)-1]
}

// output is what a pod's container printed last time, from the node's disk.
func (w *world) output(p *corev1.Pod, stream string) (string, error) {
	files, err := filepath.Glob(filepath.Join(w.Root, ".run", p.Spec.NodeName, "pods", fmt.Sprintf("%s_%s_%s", p.Namespace, p.Name, p.UID), "main", "*.log"))
	if err != nil {
		return "", fmt.Errorf("finding its log: %w", err)
	}
	if len(files) == 0 {
		return "", errors.New("it has no log")
	}
	text, err := os.ReadFile(files[len(files)-1])
	if err != nil {
		return "", fmt.Errorf("reading its log: %w", err)
	}
	var out strings.Builder
	for line := range strings.Lines(string(text)) {
		parts := strings.SplitN(line, " ", 4) // time, stream, whether the line goes on
		if len(parts) < 4 || parts[1] != stream {
			continue
		}
		if parts[2] == "P" {
			parts[3] = strings.TrimSuffix(parts[3], "\n")
		}
		out.WriteString(parts[3])
	}
	return out.String(), nil
}
