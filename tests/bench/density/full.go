package main

import (
	"bufio"
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

//go:embed pods.yaml
var manifest string

// full is a node that is full of captured pods.
type full struct {
	cluster    *kube.Cluster
	node, mode string
	pods       int
	namespace  string
}

// fill starts the pods and waits until the mesh reports that all are captured.
func (f *full) fill(ctx context.Context) error {
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "density-" + f.mode + "-"}}
	if err := f.cluster.Create(ctx, ns); err != nil {
		return err
	}
	f.namespace = ns.Name
	values := strings.NewReplacer("NAMESPACE", f.namespace, "NODE", f.node, "PODS", strconv.Itoa(f.pods), "MODE", f.mode)
	if err := f.cluster.Apply(ctx, []byte(values.Replace(manifest))); err != nil {
		return err
	}
	return kube.Until(ctx, "a full node", func(ctx context.Context) error {
		c := &meshv1alpha1.ShardingConfig{}
		if err := f.cluster.Get(ctx, client.ObjectKey{Namespace: f.namespace, Name: "watchers"}, c); err != nil {
			return err
		}
		if c.Status.ReadyMembers != int32(f.pods) {
			return fmt.Errorf("%d of %d members are ready", c.Status.ReadyMembers, f.pods)
		}
		_, err := f.answered(time.Time{})
		return err
	})
}

// empty deletes the pods, and waits until the node has room again.
func (f *full) empty(ctx context.Context) error {
	if f.namespace == "" {
		return nil
	}
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: f.namespace}}
	if err := f.cluster.Delete(ctx, ns); err != nil {
		return err
	}
	return kube.Until(ctx, "an empty node", func(ctx context.Context) error {
		err := f.cluster.Get(ctx, client.ObjectKeyFromObject(ns), ns)
		if client.IgnoreNotFound(err) == nil && err != nil {
			return nil
		}
		return errors.Join(err, errors.New("the namespace is still going"))
	})
}

// agent returns the process of the agent that is not terminating.
func (f *full) agent(ctx context.Context) (*process, error) {
	var pods corev1.PodList
	err := f.cluster.List(ctx, &pods, client.InNamespace(kube.SystemNamespace), client.MatchingLabels{"app.kubernetes.io/name": kube.AgentName})
	if err != nil {
		return nil, err
	}
	for _, pod := range pods.Items {
		if pod.Spec.NodeName == f.node && pod.DeletionTimestamp == nil {
			return agentProcess(string(pod.UID))
		}
	}
	return nil, fmt.Errorf("no agent on %s", f.node)
}

// enrolled returns when the agent that started at since captured the last pod, by the agent's
// own log.
func (f *full) enrolled(since time.Time) (last time.Time, err error) {
	captured := map[string]bool{}
	err = f.cluster.MeshLogs(kube.AgentName, func(_ string, log io.Reader) error {
		lines := bufio.NewScanner(log)
		lines.Buffer(nil, 1<<20)
		for lines.Scan() {
			_, text, _ := strings.Cut(lines.Text(), " F ") // the container runtime's prefix
			var line struct {
				Time     time.Time
				Msg, Pod string
				UID      string
			}
			if json.Unmarshal([]byte(text), &line) != nil || line.Msg != "captured" || line.Time.Before(since) ||
				!strings.HasPrefix(line.Pod, f.namespace+"/") {
				continue
			}
			captured[line.UID] = true
			if line.Time.After(last) {
				last = line.Time
			}
		}
		return lines.Err()
	})
	if err == nil && len(captured) != f.pods {
		err = fmt.Errorf("%d of %d pods are captured", len(captured), f.pods)
	}
	return last, err
}

// answered returns when the last pod's watch was first answered since then.
func (f *full) answered(since time.Time) (last time.Time, err error) {
	said, err := f.said(since)
	if err != nil {
		return last, err
	}
	answered := 0
	for _, lines := range said {
		for _, l := range lines {
			if l.what == "answered" {
				answered++
				if l.at.After(last) {
					last = l.at
				}
				break
			}
		}
	}
	if answered != f.pods {
		return last, fmt.Errorf("the watches of %d of %d pods are answered", answered, f.pods)
	}
	return last, nil
}

// failed returns how often the pods' watches failed.
func (f *full) failed(since time.Time) (int, error) {
	said, err := f.said(since)
	failed := 0
	for pod, lines := range said {
		for _, l := range lines {
			if l.what != "answered" {
				fmt.Fprintf(os.Stderr, "%s: %s %s\n", pod, l.what, l.why)
				failed++
			}
		}
	}
	return failed, err
}

// line is a line of a watcher's log.
type line struct {
	at        time.Time
	what, why string
}

// said returns the pods' log lines since then, from the files on the node's disk.
func (f *full) said(since time.Time) (map[string][]line, error) {
	files, err := filepath.Glob(filepath.Join(f.cluster.Root, ".run", f.node, "pods", f.namespace+"_*", "watcher", "*.log"))
	if err != nil {
		return nil, err
	}
	said := map[string][]line{}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		for l := range strings.Lines(string(text)) {
			_, l, _ = strings.Cut(l, " F ")
			fields := strings.SplitN(strings.TrimSpace(l), " ", 3)
			nanoseconds, err := strconv.ParseInt(fields[0], 10, 64)
			if err != nil || len(fields) < 2 || time.Unix(0, nanoseconds).Before(since) {
				continue
			}
			why := ""
			if len(fields) == 3 {
				why = fields[2]
			}
			said[file] = append(said[file], line{time.Unix(0, nanoseconds), fields[1], why})
		}
	}
	return said, nil
}

// roll replaces the agent, as an upgrade does, and calls look until the rollout is complete.
func (f *full) roll(ctx context.Context, look func()) error {
	if _, err := f.cluster.Kubectl(ctx, "-n", kube.SystemNamespace, "rollout", "restart", "daemonset/"+kube.AgentName); err != nil {
		return err
	}
	return kube.Until(ctx, "the agent's roll-out", func(ctx context.Context) error {
		look()
		return f.cluster.RolledOut(ctx, kube.Agents())
	})
}
