// Package fleet runs pods on the mesh that send requests all the time, and reads what became
// of these requests.
package fleet

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/tests/audit"
	"github.com/ctrlmesh/ctrlmesh/tests/chaos/harness"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

const (
	// Closed is the configuration with the failure policy Closed.
	Closed = "closed"
	// Open is the configuration with the failure policy Open.
	Open = "open"

	// InformerAgent is the user agent of the members' informers.
	InformerAgent = "probe-informer"

	objectName = "here" // of the ConfigMap in each shard's namespace
)

// Modes are the capture modes, as values of the annotation.
var Modes = []string{"ebpf", "iptables", "address"}

// Fleet is members under both failure policies, in each capture mode, on two nodes.
type Fleet struct {
	*harness.Testbed
	Members []*Member // none before Ensure
}

// Ensure creates the members, once in a run, and waits until all are served and captured in
// their modes.
func (f *Fleet) Ensure(ctx context.Context) error {
	if f.Members == nil {
		if err := f.create(ctx); err != nil {
			return err
		}
	}
	if err := f.WaitServed(ctx, time.Now()); err != nil {
		return err
	}
	return f.Until(ctx, "the members to be captured as they asked", func(ctx context.Context) error {
		for _, config := range []string{Closed, Open} {
			captured, err := f.CapturedModes(ctx, f.Members[0].Namespace, config)
			if err != nil {
				return err
			}
			for _, m := range f.Members {
				if m.Policy == config && captured[m.Name] != m.Mode {
					return fmt.Errorf("%s is captured by %q, not %s", m.Name, captured[m.Name], m.Mode)
				}
			}
		}
		return nil
	})
}

// create creates members under both policies on the first node, and on the other node only
// those that must never bypass the mesh.
func (f *Fleet) create(ctx context.Context) error {
	home, err := f.CreatePodNamespace(ctx, "fleet")
	if err != nil {
		return err
	}
	owns := map[string]string{}
	for name, policy := range map[string]meshv1alpha1.FailurePolicy{Closed: meshv1alpha1.FailClosed, Open: meshv1alpha1.FailOpen} {
		if owns[name], err = f.CreateShard(ctx, home, name, policy); err != nil {
			return err
		}
	}
	var members []*Member
	for i, node := range f.Nodes[:2] {
		for _, mode := range Modes {
			for _, policy := range []string{Closed, Open} {
				if policy == Open && i > 0 {
					continue
				}
				every := 50 * time.Millisecond
				if policy == Open && mode != "ebpf" || i > 0 {
					every *= 4 // enough for the checks; processors are few
				}
				p := harness.NewPod(home, fmt.Sprintf("%s-%s-%s", mode, policy, node), policy, mode, node, "probe", "pulse", "-every="+every.String())
				if err := f.CreateAll(ctx, p); err != nil {
					return err
				}
				members = append(members, &Member{Pod: p, Mode: mode, Policy: policy, Owns: owns[policy]})
			}
		}
	}
	for _, m := range members {
		m.log.Pattern = f.ContainerLog(m.Pod)
	}
	f.Members = members
	f.Logf("  %d members, on %s", len(members), strings.Join(f.Nodes[:2], " and "))
	return nil
}

// WaitServed waits until each member has had a response through the mesh to each kind of
// request that it began after a time.
func (f *Fleet) WaitServed(ctx context.Context, after time.Time) error {
	for _, m := range f.Members {
		for _, kind := range []string{FreshKind, "http1", "http2", writeKind} {
			_, err := m.WaitRequest(ctx, "an answer to "+kind, after, func(r Request) bool {
				return r.Kind == kind && r.ViaMesh() && r.Start.After(after) && !r.Beyond(m.Owns)
			})
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// WaitWorking waits until each member is served from now on and its informer receives events.
func (f *Fleet) WaitWorking(ctx context.Context) error {
	if err := f.WaitServed(ctx, time.Now()); err != nil {
		return err
	}
	return f.WaitInformers(ctx)
}

// WaitInformers changes an object of each shard and waits until all members have received the
// event.
func (f *Fleet) WaitInformers(ctx context.Context) error {
	versions := map[string]string{}
	for _, m := range f.Members {
		if versions[m.Owns] != "" {
			continue
		}
		cm := &corev1.ConfigMap{}
		if err := f.Get(ctx, client.ObjectKey{Namespace: m.Owns, Name: objectName}, cm); err != nil {
			return fmt.Errorf("changing an object: %w", err)
		}
		cm.Data = map[string]string{"touched": time.Now().String()}
		if err := f.Update(ctx, cm); err != nil {
			return fmt.Errorf("changing an object: %w", err)
		}
		versions[m.Owns] = cm.ResourceVersion
	}
	var errs []error
	for _, m := range f.Members {
		errs = append(errs, m.waitEvent(ctx, versions[m.Owns]))
	}
	return errors.Join(errs...)
}

// Under returns the members under a failure policy.
func (f *Fleet) Under(policy string) []*Member {
	return slices.DeleteFunc(slices.Clone(f.Members), func(m *Member) bool { return m.Policy != policy })
}

// On returns the members on a node.
func (f *Fleet) On(node string) []*Member {
	return slices.DeleteFunc(slices.Clone(f.Members), func(m *Member) bool { return m.Spec.NodeName != node })
}

// IDs returns the members' names as namespace/name.
func IDs(members []*Member) (out []string) {
	for _, m := range members {
		out = append(out, m.id())
	}
	return out
}

// Count returns how many of the members' requests that began in [from, to) match. It prints
// an example for each member, under the given title.
func (f *Fleet) Count(title string, members []*Member, from, to time.Time, match func(*Member, Request) bool) (total int, err error) {
	for _, m := range members {
		all, err := m.Requests()
		if err != nil {
			return total, err
		}
		n, example := count(Between(all, from, to), func(r Request) bool { return match(m, r) })
		if n > 0 {
			f.Logf("  ! %s: %s: %s", title, m.Name, example)
		}
		total += n
	}
	return total, nil
}

// Leaks returns the requests that no agent passed. It excludes those that members sent to
// the mesh alone and that were in flight when an agent was killed.
func (f *Fleet) Leaks(ctx context.Context, requests []audit.Request, kills []time.Time) ([]audit.Request, error) {
	sent := map[string]bool{}
	for _, m := range f.Members {
		all, err := m.Requests()
		if err != nil {
			return nil, err
		}
		for _, r := range all {
			sent[r.ID] = len(r.Issuers) > 0 && !r.Direct()
		}
	}
	return f.Testbed.Leaks(ctx, requests, kills, func(id string) bool { return sent[id] })
}

// LeaksOf returns how many requests the members sent since a mark, and those that no
// agent passed.
func (f *Fleet) LeaksOf(ctx context.Context, members []*Member, since kube.Mark, kills []time.Time) (int, []audit.Request, error) {
	requests, err := f.PodRequests(since, IDs(members)...)
	if err != nil {
		return 0, nil, err
	}
	leaked, err := f.Leaks(ctx, requests, kills)
	return len(requests), leaked, err
}
