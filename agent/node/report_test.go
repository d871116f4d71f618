package node

import (
	"crypto/tls"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy"
	"github.com/ctrlmesh/ctrlmesh/proxy/lock"
)

func TestReportHasTheRefusalsOfLocks(t *testing.T) {
	require.Empty(t, lockRefusals(nil))
	out := lockRefusals([]lock.Refusal{{Namespace: "kube-system", Name: "op", Resource: "configmaps", Verb: "update", Code: 403, Message: "no"}})
	require.Len(t, out, 1)
	require.True(t, proto.Equal(&meshv1.LockRefusal{Namespace: "kube-system", Name: "op", Resource: "configmaps", Verb: "update", Code: 403, Message: "no"}, out[0]))
}

// Each report is sent to the manager when a value in it changes. Counts always do.
func TestChangedActivityAloneIsReportedSeldom(t *testing.T) {
	server, err := proxy.New(proxy.Config{Leaf: func() (*tls.Certificate, error) { return nil, errors.New("none") }})
	require.NoError(t, err)
	before := []*meshv1.ResourceActivity{{Resource: "secrets", Writes: 3}}
	now := time.Now()
	for _, q := range []struct {
		name, version string
		after         time.Duration
		kept          bool
	}{
		{"a moment later", "1-x", activityInterval - 1, true},
		{"later", "1-x", activityInterval, false},
		{"under another policy", "2-x", 0, false},
	} {
		t.Run(q.name, func(t *testing.T) {
			p := &pod{reporting: reporting{reported: &meshv1.PodReport{Version: "1-x", Activity: before}, active: now}}
			p.redirection.proxied = server.Pod(proxy.PodInfo{UID: "a", Namespace: "ns", Name: "a"}, nil)
			r := &meshv1.PodReport{Version: q.version}
			p.addActivity(r, now.Add(q.after))
			require.Equal(t, q.kept, len(r.GetActivity()) > 0)
		})
	}
}

func TestChangedUsageIsReportedSeldom(t *testing.T) {
	server, err := proxy.New(proxy.Config{Leaf: func() (*tls.Certificate, error) { return nil, errors.New("none") }})
	require.NoError(t, err)
	now := time.Now()
	p := &pod{reporting: reporting{reported: &meshv1.PodReport{Usage: &meshv1.Usage{Requests: 1}}, used: now}}
	p.redirection.proxied = server.Pod(proxy.PodInfo{UID: "a", Namespace: "ns", Name: "a"}, nil)
	for after, kept := range map[time.Duration]bool{usageInterval - 1: true, usageInterval: false} {
		r := &meshv1.PodReport{}
		p.addUsage(r, now.Add(after))
		require.Equal(t, kept, r.GetUsage() != nil)
	}
}
