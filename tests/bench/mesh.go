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
		return fmt.Errorf("no policy %q: there are member, passing and observed", o.policy)
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
