package main

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"
	"os"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/processors"
	"github.com/ctrlmesh/ctrlmesh/proxy"
)

// serveMesh runs ctrlmesh's data plane for one member, as the agent does. The member's shard
// owns every object of the benchmark, and has a lock in the same namespace, so that both
// stages of the policy are active.
func serveMesh(ctx context.Context, o options) error {
	leaf, err := tls.LoadX509KeyPair(o.cert, o.cert)
	if err != nil {
		return err
	}
	ca, err := os.ReadFile(o.ca)
	if err != nil {
		return err
	}
	server, err := newProxy(&leaf)
	if err != nil {
		return err
	}
	if err := server.SetCluster(&meshv1.Cluster{ServiceAddresses: []string{o.api}, Ca: ca}); err != nil {
		return err
	}
	pod := server.Pod(proxy.PodInfo{UID: "bench", Namespace: o.namespace, Name: "bench-0"}, (&net.Dialer{}).DialContext)
	policyOf, ok := policies[o.policy]
	if !ok {
		return fmt.Errorf("no policy %q: there are member, rules, passing and observed", o.policy)
	}
	policy := policyOf(o.namespace)
	if o.owns != "" {
		if policy, err = filtering(o.namespace, o.owns); err != nil {
			return err
		}
	}
	if err := pod.Restore(policy, time.Time{}); err != nil {
		return err
	}
	l, err := inherited()
	if err != nil {
		return err
	}
	go processors.Adapt(ctx)
	context.AfterFunc(ctx, func() {
		now, cancel := context.WithCancel(context.Background())
		cancel()
		_ = pod.Shutdown(now)
	})
	return pod.Serve(l)
}

// newProxy returns a proxy with what an agent gives it.
func newProxy(leaf *tls.Certificate) (*proxy.Server, error) {
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return proxy.New(proxy.Config{
		Leaf:       func() (*tls.Certificate, error) { return leaf, nil },
		Logger:     slog.New(slog.NewJSONHandler(os.Stderr, nil)), // at info
		Registerer: registry,
		Node:       "bench",
	})
}

// policies of the pod of ctrlmesh, by the flag that names them.
var policies = map[string]func(namespace string) *meshv1.PodPolicy{
	"member": policy,
	"passing": func(namespace string) *meshv1.PodPolicy {
		p := policy(namespace)
		p.Sharding.Limits, p.Sharding.Locks = nil, nil
		return p
	},
	"rules": func(namespace string) *meshv1.PodPolicy {
		p := policy(namespace)
		p.Traffic = &meshv1.Traffic{Breakers: []*meshv1.Breaker{{Name: "bench", Rules: hundredRules(namespace)}}}
		return p
	},
	"observed": func(namespace string) *meshv1.PodPolicy {
		p := policy(namespace)
		p.Sharding = nil
		return p
	},
}

func policy(namespace string) *meshv1.PodPolicy {
	return &meshv1.PodPolicy{
		Uid: "bench", Namespace: namespace, Name: "bench-0", Workload: "bench", Version: "1",
		Sharding: &meshv1.Sharding{
			Shard: "shard-0",
			Limits: []*meshv1.Limit{{
				Resources: []*meshv1.ResourceGroup{{ApiGroups: []string{"*"}, Resources: []string{"configmaps"}}},
				Selector:  shardLabel + " in (" + shard + ")",
			}},
			Locks: []*meshv1.Lock{{Namespace: namespace, Name: "leader", UpstreamName: "leader---shard-0"}},
		},
	}
}

// hundredRules limit requests in as many namespaces. The last of them limits those of the
// benchmark, to more than it reaches.
func hundredRules(namespace string) []*meshv1.LimitRule {
	rules := make([]*meshv1.LimitRule, 100)
	for i := range rules {
		of := fmt.Sprintf("tenant-%02d", i)
		if i == len(rules)-1 {
			of = namespace
		}
		rules[i] = &meshv1.LimitRule{
			Name: fmt.Sprintf("rule-%02d", i), Key: fmt.Sprint(i),
			Resources: []*meshv1.ResourceMatch{{ApiGroups: []string{""}, Resources: []string{"configmaps"}, Verbs: []string{"get", "list", "watch"}, Namespaces: []string{of}}},
			Bucket:    &meshv1.Bucket{Burst: 1_000_000, Limit: 1_000_000, IntervalNs: int64(time.Second)},
			Trigger:   meshv1.Trigger_TRIGGER_LIMITER_ONLY,
		}
	}
	return rules
}
