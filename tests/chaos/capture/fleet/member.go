package fleet

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/ctrlmesh/ctrlmesh/tests/chaos/harness"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
	"github.com/ctrlmesh/ctrlmesh/tests/stats"
)

// Member is a pod that sends requests all the time.
type Member struct {
	*corev1.Pod
	Mode, Policy string // of capture, and its configuration by failure policy
	Owns         string // the namespace of its shard

	mu       sync.Mutex
	log      harness.Follower
	requests []Request
	events   []event
}

func (m *Member) id() string { return m.Namespace + "/" + m.Name }

// Requests returns the member's requests so far.
func (m *Member) Requests() ([]Request, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	err := m.log.Read(func(text []byte) error {
		requests, events := parsePulse(text)
		m.requests = append(m.requests, requests...)
		m.events = append(m.events, events...)
		return nil
	})
	return m.requests, err
}

// WaitRequest waits for a request that ended after a time and is as wanted.
func (m *Member) WaitRequest(ctx context.Context, what string, after time.Time, wanted func(Request) bool) (found Request, err error) {
	err = kube.UntilWithin(ctx, harness.Timeout, what+" of "+m.Name, func(context.Context) error {
		all, err := m.Requests()
		if err != nil {
			return kube.Never(err)
		}
		ok := false
		if found, ok = First(all, after, wanted); !ok {
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

// waitEvent waits until the member's informer has received a version of the object of its
// shard.
func (m *Member) waitEvent(ctx context.Context, version string) error {
	return kube.UntilWithin(ctx, harness.Timeout, "the informer of "+m.Name, func(context.Context) error {
		if _, err := m.Requests(); err != nil {
			return kube.Never(err)
		}
		m.mu.Lock()
		defer m.mu.Unlock()
		for _, c := range m.events {
			if c.Object == m.Owns+"/"+objectName && c.Version == version {
				return nil
			}
		}
		return fmt.Errorf("it has not received version %s", version)
	})
}

// WaitViaMesh waits until some new connections of a member in a row used the mesh. It returns
// when the last one that did not began, or since if all did.
func (m *Member) WaitViaMesh(ctx context.Context, since time.Time) (last time.Time, err error) {
	const enough = 6
	err = kube.UntilWithin(ctx, harness.Timeout, m.Name+" to meet the mesh", func(context.Context) error {
		all, err := m.Requests()
		if err != nil {
			return kube.Never(err)
		}
		last = since
		good, example := 0, ""
		for _, r := range Between(all, since, time.Now()) {
			switch {
			case r.Kind != FreshKind:
			case r.ViaMesh():
				good++
			default:
				good, example = 0, r.String()
				if r.Start.After(last) {
					last = r.Start
				}
			}
		}
		if good < enough {
			return fmt.Errorf("%d in a row; %s", good, example)
		}
		return nil
	})
	return last, err
}

// Latency returns the 99th percentile of the member's response times, and describes a request
// that failed, if one did.
func (m *Member) Latency(from, to time.Time) (worst time.Duration, failed string, err error) {
	all, err := m.Requests()
	if err != nil {
		return 0, "", err
	}
	var took []time.Duration
	for _, r := range Between(all, from, to) {
		took = append(took, r.End().Sub(r.Start))
		refusedAbove := r.Code == http.StatusTooManyRequests && strings.Contains(r.Error, fairness)
		if !r.OK() && !refusedAbove {
			failed = r.String()
		}
	}
	if len(took) == 0 {
		return 0, "", fmt.Errorf("%s did not ask", m.Name)
	}
	return stats.Percentile(took, 0.99), failed, nil
}

// fairness is what the apiserver itself answers when it is overloaded, which an intruder can
// cause without a mesh.
const fairness = "Too many requests, please try again later."
