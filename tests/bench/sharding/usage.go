package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/internal/failure"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
	"github.com/ctrlmesh/ctrlmesh/tests/stats"
)

var (
	agentLabels   = client.MatchingLabels{"app.kubernetes.io/name": kube.AgentName}
	managerLabels = client.MatchingLabels{"app.kubernetes.io/name": kube.ManagerName}
)

// idleFor is a few renewals of each lock.
const idleFor = 6 * time.Second

// usage is processor time, the kernel's part included.
type usage struct{ operator, agents, manager, apiserver time.Duration }

func (u usage) minus(v usage) usage {
	return usage{u.operator - v.operator, u.agents - v.agents, u.manager - v.manager, u.apiserver - v.apiserver}
}

func (u usage) over(n int) usage {
	each := func(d time.Duration) time.Duration { return d / time.Duration(n) }
	return usage{each(u.operator), each(u.agents), each(u.manager), each(u.apiserver)}
}

// used returns the usage of all running pods so far.
func (b *bench) used(ctx context.Context, namespace string) (u usage, err error) {
	for _, of := range []struct {
		to     *time.Duration
		in     string
		labels client.MatchingLabels
	}{
		{&u.operator, namespace, operatorLabels},
		{&u.agents, kube.SystemNamespace, agentLabels},
		{&u.manager, kube.SystemNamespace, managerLabels},
	} {
		var pods corev1.PodList
		if err := b.List(ctx, &pods, client.InNamespace(of.in), of.labels); err != nil {
			return u, err
		}
		for _, pod := range pods.Items {
			used, err := ofGroup(string(pod.UID))
			if err != nil {
				return u, fmt.Errorf("processor time of %s: %w", pod.Name, err)
			}
			*of.to += used
		}
	}
	u.apiserver, err = ofUnit(b.Root, "kube-apiserver")
	return u, err
}

// idle returns the usage of all per second without changes.
func (b *bench) idle(ctx context.Context, namespace string) (usage, error) {
	before, err := b.used(ctx, namespace)
	if err != nil {
		return usage{}, err
	}
	if err := kube.Sleep(ctx, idleFor); err != nil {
		return usage{}, err
	}
	after, err := b.used(ctx, namespace)
	return after.minus(before).over(int(idleFor / time.Second)), err
}

// ofGroup returns the usage of a pod, by its cgroup, whose name contains the pod's uid.
func ofGroup(uid string) (used time.Duration, err error) {
	root := "/sys/fs/cgroup/cpuacct"
	if _, err := os.Stat(root); err != nil {
		root = "/sys/fs/cgroup" // version 2
	}
	found := errors.New("no control group")
	err = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.IsDir() || !strings.Contains(d.Name(), uid) {
			return nil // other cgroups are created and removed meanwhile
		}
		used, found = ofPath(path)
		return fs.SkipAll
	})
	return used, errors.Join(err, found)
}

func ofPath(group string) (time.Duration, error) {
	text, err := os.ReadFile(filepath.Join(group, "cpuacct.usage"))
	unit := time.Nanosecond
	if errors.Is(err, fs.ErrNotExist) {
		text, err = os.ReadFile(filepath.Join(group, "cpu.stat"))
		line, _, _ := strings.Cut(string(text), "\n")
		text, unit = []byte(strings.TrimPrefix(line, "usage_usec ")), time.Microsecond
	}
	if err != nil {
		return 0, err
	}
	n, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
	return time.Duration(n) * unit, err
}

// ofUnit returns the usage of a component of tests/cluster.
func ofUnit(root, name string) (time.Duration, error) {
	text, err := os.ReadFile(filepath.Join(root, ".run", "units", name))
	if err != nil {
		return 0, fmt.Errorf("only a cluster of tests/cluster can be measured: %w", err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		return 0, err
	}
	used, err := stats.ProcessorTime(pid)
	return used, failure.Wrap(err, "processor time of %s", name)
}

// Metrics of Go's collector.
const (
	liveBytes = "go_gc_heap_live_bytes" // in use at the last garbage collection
	cycles    = "go_gc_cycles_total_gc_cycles_total"
)

// live returns how much of a pod's heap is in use, by a garbage collection that began after the
// call: the second that ends. Reading metrics allocates the garbage for it.
func (b *bench) live(ctx context.Context, namespace, pod string) (bytes float64, err error) {
	first := -1.0
	err = until(ctx, "two collections of "+pod, func(ctx context.Context) error {
		for range 20 {
			m, err := b.metrics(ctx, namespace, pod, liveBytes, cycles)
			if err != nil {
				return err
			}
			if first < 0 {
				first = m[cycles]
			}
			if bytes = m[liveBytes]; m[cycles] >= first+2 {
				return nil
			}
		}
		return errors.New("not yet")
	})
	return bytes, err
}

// metrics reads some of those without labels.
func (b *bench) metrics(ctx context.Context, namespace, pod string, names ...string) (map[string]float64, error) {
	text, err := b.Clientset.CoreV1().RESTClient().Get().Namespace(namespace).Resource("pods").Name(pod + ":8080").
		SubResource("proxy").Suffix("metrics").DoRaw(ctx)
	if err != nil {
		return nil, fmt.Errorf("reading the metrics of %s: %w", pod, err)
	}
	out := map[string]float64{}
	lines := bufio.NewScanner(bytes.NewReader(text))
	for lines.Scan() {
		name, value, _ := strings.Cut(lines.Text(), " ")
		for _, n := range names {
			if n != name {
				continue
			}
			if out[n], err = strconv.ParseFloat(value, 64); err != nil {
				return nil, fmt.Errorf("metric %s of %s: %w", name, pod, err)
			}
		}
	}
	if len(out) != len(names) {
		return nil, fmt.Errorf("%s has only %v of %v", pod, out, names)
	}
	return out, nil
}
