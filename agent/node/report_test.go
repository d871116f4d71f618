package node

import (
	"crypto/tls"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/ctrlmesh/ctrlmesh/agent/capture"
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

// A pod can write a lock by protobuf whose holder is not UTF-8, which no message of the manager's protocol can have.
func TestReportsAreValid(t *testing.T) {
	p := &pod{}
	dead := &meshv1.DeadHolder{Name: "lock", Identity: "a\xff"}
	state := &meshv1.PodReport{Uid: "a", HeldLocks: []string{"ns/\xfe"}, DeadHolders: []*meshv1.DeadHolder{dead}, ObservedLocks: []*meshv1.ObservedLock{{Holder: "\xff\xffb"}},
		Methods: map[string]string{"foos.\xff": "Labels\xff", "secrets": "Filter"}}
	require.True(t, p.read(state, time.Now()))
	require.False(t, p.read(state, time.Now()), "nothing has changed")
	_, err := proto.Marshal(p.report())
	require.NoError(t, err)
	require.Equal(t, "ns/?", p.report().GetHeldLocks()[0])
	require.Equal(t, "a?", p.report().GetDeadHolders()[0].GetIdentity())
	require.Equal(t, "?b", p.report().GetObservedLocks()[0].GetHolder())
	require.Equal(t, map[string]string{"foos.?": "Labels?", "secrets": "Filter"}, p.report().GetMethods())
	require.Equal(t, "a\xff", dead.GetIdentity(), "it is compared with what the pod writes")
}

// Each report is sent to the manager when a value in it changes. Counts often do.
func TestPartsAreReadSeldomUnlessTheStateChanges(t *testing.T) {
	server, err := proxy.New(proxy.Config{Leaf: func() (*tls.Certificate, error) { return nil, errors.New("none") }})
	require.NoError(t, err)
	now := time.Now()
	for _, q := range []struct {
		name, version              string
		after                      time.Duration
		counts, activity, requests bool // read again
	}{
		{"a moment later", "1-x", countInterval - 1, false, false, false},
		{"2 s later", "1-x", countInterval, true, false, false},
		{"10 s later", "1-x", activityInterval, true, true, false},
		{"15 s later", "1-x", usageInterval, true, true, true},
		{"under another policy", "2-x", 0, true, true, true},
	} {
		t.Run(q.name, func(t *testing.T) {
			p := &pod{}
			p.redirection.proxied = server.Pod(proxy.PodInfo{UID: "a", Namespace: "ns", Name: "a"}, nil)
			p.redirection.captured = &capture.Pod{}
			state := &meshv1.PodReport{Uid: "a", Version: "1-x"}
			require.True(t, p.read(state, now))
			require.False(t, p.read(proto.CloneOf(state), now), "nothing has changed")
			p.reporting.parts[0].note(&meshv1.PodReport{Methods: map[string]string{"secrets": "Labels"}}, now)
			p.reporting.parts[1].note(&meshv1.PodReport{Activity: []*meshv1.ResourceActivity{{Resource: "secrets", Writes: 3}}}, now)
			p.reporting.parts[2].note(&meshv1.PodReport{Usage: &meshv1.Usage{Requests: 1}}, now)

			changed := p.read(&meshv1.PodReport{Uid: "a", Version: q.version}, now.Add(q.after))

			require.Equal(t, q.counts, changed)
			r := p.report()
			require.Equal(t, q.version, r.GetVersion())
			require.Equal(t, []bool{q.counts, q.activity, q.requests}, []bool{len(r.GetMethods()) == 0, len(r.GetActivity()) == 0, r.GetUsage() == nil})
		})
	}
}
