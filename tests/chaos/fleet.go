package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

const (
	closed = "closed" // configurations, by their failure policy
	open   = "open"

	// touchedName is the ConfigMap that every owned namespace has.
	touchedName  = "here"
	informerName = "probe-informer" // user agent of the fleet's informers
)

// member is a pod that asks all the time.
type member struct {
	*corev1.Pod
	way, policy string
	owns        string

	mu      sync.Mutex
	log     follower
	beats   []beat
	changes []change
}

func (m *member) id() string { return m.Namespace + "/" + m.Name }

// asked are the member's requests so far.
func (m *member) asked() ([]beat, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	err := m.log.read(func(text []byte) error {
		beats, changes := parsePulse(text)
		m.beats = append(m.beats, beats...)
		m.changes = append(m.changes, changes...)
		return nil
	})
	return m.beats, err
}

// await waits for a request that ended after a time and is as wanted.
func (m *member) await(ctx context.Context, what string, after time.Time, wanted func(beat) bool) (found beat, err error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	err = kube.Until(ctx, what+" of "+m.Name, func(context.Context) error {
		all, err := m.asked()
		if err != nil {
			return kube.Never(err)
		}
		ok := false
		if found, ok = first(all, after, wanted); !ok {
			last := "none"
			if len(all) > 0 {
				last = all[len(all)-1].String()
			}
			return fmt.Errorf("not among %d requests; the last: %s", len(all), last)
		}
		return nil
	})
	return found, err
}

// told waits until the member's informer has heard of a version of the object that
// its shard owns.
func (m *member) told(ctx context.Context, version string) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	return kube.Until(ctx, "the informer of "+m.Name, func(context.Context) error {
		if _, err := m.asked(); err != nil {
			return kube.Never(err)
		}
		m.mu.Lock()
		defer m.mu.Unlock()
		for _, c := range m.changes {
			if c.Object == m.owns+"/"+touchedName && c.Version == version {
				return nil
			}
		}
		return fmt.Errorf("it has not heard of version %s", version)
	})
}

// fleet returns members under both failure policies in each way of capture, on each
// node, that all work. They are made once and live through all parts.
func (w *world) fleet(ctx context.Context, r *result) ([]*member, error) {
	if w.members == nil {
		if err := w.makeFleet(ctx); err != nil {
			return nil, err
		}
	}
	if err := w.fleetWorks(ctx, time.Now()); err != nil {
		return nil, err
	}
	err := w.until(ctx, "the members to be captured as they asked", func(ctx context.Context) error {
		for _, config := range []string{closed, open} {
			captured, err := w.captureOf(ctx, w.members[0].Namespace, config)
			if err != nil {
				return err
			}
			for _, m := range w.members {
				if m.policy == config && captured[m.Name] != m.way {
					return fmt.Errorf("%s is captured by %q, not %s", m.Name, captured[m.Name], m.way)
				}
			}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	for _, m := range w.members {
		r.captured(m.way)
	}
	return w.members, nil
}

// makeFleet puts both policies side by side on the first node, and on each other
// node the one that must never go direct.
func (w *world) makeFleet(ctx context.Context) error {
	home, err := w.home(ctx, "fleet")
	if err != nil {
		return err
	}
	owns := map[string]string{}
	for name, policy := range map[string]meshv1alpha1.FailurePolicy{closed: meshv1alpha1.FailClosed, open: meshv1alpha1.FailOpen} {
		if owns[name], err = w.shard(ctx, home, name, policy); err != nil {
			return err
		}
	}
	var members []*member
	for i, node := range w.nodes[:2] {
		for _, way := range ways {
			for _, policy := range []string{closed, open} {
				if policy == open && i > 0 {
					continue
				}
				every := 50 * time.Millisecond
				if policy == open && way != "ebpf" || i > 0 {
					every *= 4 // enough to tell, and the processors are few
				}
				p := pod(home, fmt.Sprintf("%s-%s-%s", way, policy, node), policy, way, node, "probe", "pulse", "-every="+every.String())
				if err := w.create(ctx, p); err != nil {
					return err
				}
				members = append(members, &member{Pod: p, way: way, policy: policy, owns: owns[policy]})
			}
		}
	}
	for _, m := range members {
		m.log.pattern = filepath.Join(w.Root, ".run", m.Spec.NodeName, "pods", fmt.Sprintf("%s_%s_%s", m.Namespace, m.Name, m.UID), "main", "*.log*")
	}
	w.members = members
	w.say("  %d members, on %s", len(members), strings.Join(w.nodes[:2], " and "))
	return nil
}

// fleetWorks waits until each member was answered through the mesh, in each kind of
// request, after a time.
func (w *world) fleetWorks(ctx context.Context, after time.Time) error {
	for _, m := range w.members {
		for _, kind := range []string{freshKind, "http1", "http2", writeKind} {
			_, err := m.await(ctx, "an answer to "+kind, after, func(b beat) bool {
				return b.Kind == kind && b.meshed() && b.Start.After(after) && !b.wide(m.owns)
			})
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// informersWork changes an object of each shard and waits until all members have
// heard of it.
func (w *world) informersWork(ctx context.Context) error {
	versions := map[string]string{}
	for _, m := range w.members {
		if versions[m.owns] != "" {
			continue
		}
		cm := &corev1.ConfigMap{}
		if err := w.Get(ctx, client.ObjectKey{Namespace: m.owns, Name: touchedName}, cm); err != nil {
			return fmt.Errorf("changing an object: %w", err)
		}
		cm.Data = map[string]string{"touched": time.Now().String()}
		if err := w.Update(ctx, cm); err != nil {
			return fmt.Errorf("changing an object: %w", err)
		}
		versions[m.owns] = cm.ResourceVersion
	}
	var errs []error
	for _, m := range w.members {
		errs = append(errs, m.told(ctx, versions[m.owns]))
	}
	return errors.Join(errs...)
}

// of are the members under a policy.
func of(members []*member, policy string) (out []*member) {
	for _, m := range members {
		if m.policy == policy {
			out = append(out, m)
		}
	}
	return out
}

func ids(members []*member) (out []string) {
	for _, m := range members {
		out = append(out, m.id())
	}
	return out
}
