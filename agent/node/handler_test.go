package node

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/ctrlmesh/ctrlmesh/agent/inflight"
	"github.com/ctrlmesh/ctrlmesh/agent/node/lifecycle"
	"github.com/ctrlmesh/ctrlmesh/agent/pods"
	"github.com/ctrlmesh/ctrlmesh/agent/state"
	"github.com/ctrlmesh/ctrlmesh/agent/takeover"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy"
)

// served makes a pod one whose requests come here.
func (r *running) served(t *testing.T, uid string) {
	t.Helper()
	require.NoError(t, r.do(t.Context(), func() error {
		p := r.Proxy.Pod(proxy.PodInfo{UID: uid, Namespace: "ns", Name: uid}, nil)
		r.pods[uid] = &pod{
			info: pods.Pod{UID: uid, Namespace: "ns", Name: uid}, announced: time.Now(),
			state:       lifecycle.State{Presence: lifecycle.Announced, Redirect: lifecycle.Successor, Proxy: lifecycle.Waiting},
			redirection: redirection{proxied: p},
		}
		return nil
	}))
}

// The manager takes a pod's version as unknown once it has sent another policy.
func TestRejectedPolicyIsFollowedByAReport(t *testing.T) {
	r := start(t, 0)
	r.served(t, "a")
	setPolicy(t, r, &meshv1.PodPolicy{Uid: "a", Version: "7-x", Serial: 7})
	r.soon(t, "the report", func() bool { return r.reported("a") != nil })
	for name, rejected := range map[string]*meshv1.PodPolicy{
		"by its serial": {Uid: "a", Version: "6-x", Serial: 6},
		"by the proxy":  {Uid: "a", Version: "8-x", Serial: 8, Sharding: &meshv1.Sharding{Shard: "by-hand", Limits: []*meshv1.Limit{{Selector: "((("}}}},
	} {
		r.mu.Lock()
		delete(r.reports, "a")
		r.mu.Unlock()
		_, err := r.SetPolicy(rejected)
		require.Error(t, err, name)
		r.soon(t, "the report "+name, func() bool { return r.reported("a") != nil })
	}
}

func TestLowerSerialIsRejectedByNextAgentToo(t *testing.T) {
	r := start(t, 0)
	r.served(t, "a")
	setPolicy(t, r, &meshv1.PodPolicy{Uid: "a", Version: "7-x", Serial: 7})
	_, err := r.SetPolicy(&meshv1.PodPolicy{Uid: "a", Version: "6-x", Serial: 6})
	require.ErrorContains(t, err, "policy 6-x has serial 6, and the pod may act on 7 or later")
	assert.Equal(t, map[string]string{"a": "7-x"}, r.Versions(), "the last good one")

	setPolicy(t, r, &meshv1.PodPolicy{Uid: "a", Version: "none", Refuse: "no shard yet"})
	assert.Equal(t, map[string]string{"a": "none"}, r.Versions())

	next := restarted(t, r)
	_, err = next.SetPolicy(&meshv1.PodPolicy{Uid: "a", Version: "6-x", Serial: 6})
	require.Error(t, err, "a refusal lowers nothing")
	applied, err := next.SetPolicy(&meshv1.PodPolicy{Uid: "a", Version: "7-x", Serial: 7})
	require.Error(t, err, "it came late: the pod was refused since")
	assert.EqualValues(t, 7, applied.Serial)
	assert.True(t, applied.Barred)
	applied, err = next.SetPolicy(&meshv1.PodPolicy{Uid: "a", Version: "8-y", Serial: 8})
	require.NoError(t, err)
	assert.EqualValues(t, 8, applied.Serial)
	assert.False(t, applied.Barred)

	_, err = next.SetPolicy(&meshv1.PodPolicy{Uid: "a", Version: "by-hand", Sharding: &meshv1.Sharding{Shard: "by-hand"}})
	require.ErrorContains(t, err, "delete the pod")
}

// Another policy may enter the loop before the ack of one is sent.
func TestAckHasTheSerialOfItsPolicy(t *testing.T) {
	r := start(t, 0)
	r.served(t, "a")
	var last atomic.Uint64
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			for range 50 {
				p := &meshv1.PodPolicy{Uid: "a", Serial: last.Add(1)}
				p.Version = fmt.Sprint(p.GetSerial())
				invalid := p.GetSerial()%2 == 0
				if invalid {
					p.Traffic = &meshv1.Traffic{Breakers: []*meshv1.Breaker{{Rules: []*meshv1.LimitRule{{}}}}}
				}
				applied, err := r.SetPolicy(p)
				if err != nil {
					assert.Greater(t, applied.Serial, p.GetSerial(), "a later one came first")
					continue
				}
				assert.Equal(t, p.GetSerial(), applied.Serial)
				assert.Equal(t, invalid, applied.TrafficProblem != "", "policy %s", p.GetVersion())
			}
		})
	}
	all.Wait()
}

// A restored backup may have a pod as a member that ended since, and that its agent forgot.
func TestPolicyOfUnknownMemberIsRejected(t *testing.T) {
	r := start(t, 0)
	r.served(t, "a")
	applied, err := r.SetPolicy(&meshv1.PodPolicy{Uid: "a", Version: "7-x", Serial: 7, RequiredSerial: 6})
	require.ErrorContains(t, err, "policy 7-x requires a pod that has had serial 6 and was not refused since")
	assert.Zero(t, applied.Serial)
	assert.Equal(t, map[string]string{"a": ""}, r.Versions())
	setPolicy(t, r, &meshv1.PodPolicy{Uid: "a", Version: "7-gone", Serial: 7, RequiredSerial: 6, Refuse: "forgotten"})
	next := restarted(t, r)
	_, err = next.SetPolicy(&meshv1.PodPolicy{Uid: "a", Version: "8-x", Serial: 8, RequiredSerial: 7})
	require.Error(t, err, "a refusal may have ended its membership")
	setPolicy(t, next, &meshv1.PodPolicy{Uid: "a", Version: "8-x", Serial: 8})
	setPolicy(t, restarted(t, next), &meshv1.PodPolicy{Uid: "a", Version: "9-x", Serial: 9, RequiredSerial: 8})
}

// The manager counts a pod that it does not know as one that acts until this is so.
func TestRemovedPodIsRefusedOnceItsWritesHaveEnded(t *testing.T) {
	r := start(t, 0)
	r.served(t, "a")
	setPolicy(t, r, &meshv1.PodPolicy{Uid: "a", Version: "7-x", Serial: 7})
	over, another := make(chan struct{}), make(chan struct{})
	r.in(t, func() { r.earlier.Add("a", over); r.earlier.Add("gone", another); r.earlier.Deleted("gone", "another") })
	applied, err := r.RemovePolicy("a")
	require.NoError(t, err)
	assert.EqualValues(t, 7, applied.Serial)
	assert.False(t, inflight.Closed(applied.Settled))
	close(over)
	<-applied.Settled
	applied, err = r.RemovePolicy("gone")
	require.NoError(t, err)
	assert.False(t, inflight.Closed(applied.Settled))
	assert.Equal(t, map[string]string{"a": "", "gone": ""}, r.Versions())
	assert.Equal(t, map[string]string{"a": "ns", "gone": "another"}, r.Namespaces())
	close(another)
	<-applied.Settled
	applied, err = r.RemovePolicy("unknown")
	require.NoError(t, err)
	assert.True(t, inflight.Closed(applied.Settled))
}

// restarted is the agent after r, on the same node, that knows pod a from disk.
func restarted(t *testing.T, r *running) *running {
	t.Helper()
	next := start(t, 0)
	require.NoError(t, next.do(t.Context(), func() error {
		next.Store = r.Store
		next.presence.restore(next.destinations, nil, nil)
		next.pods["a"].announced = time.Now()
		return nil
	}))
	return next
}

// Of a pod that is gone the manager knows no rules. If it runs on, they hold, in the next
// agent too.
func TestDeletedPodKeepsItsRules(t *testing.T) {
	r := start(t, 0)
	r.served(t, "a")
	traffic := &meshv1.Traffic{
		Breakers: []*meshv1.Breaker{{Name: "cap", Rules: []*meshv1.LimitRule{{
			Name: "hosts", Key: "k", Http: []*meshv1.HttpMatch{{}}, MaxInFlight: 1, Share: &meshv1.Share{Of: 1},
		}}}},
		Egress: &meshv1.Egress{Ports: []uint32{443}},
	}
	setPolicy(t, r, &meshv1.PodPolicy{Uid: "a", Version: "7-x", Serial: 7, Traffic: traffic})
	setPolicy(t, r, &meshv1.PodPolicy{Uid: "a", Version: "7-gone", Serial: 7, Refuse: "gone"})
	inForce := func() (out *meshv1.Traffic) {
		r.in(t, func() { out = r.pods["a"].assignment.applied.Rules })
		return out
	}
	assert.Equal(t, []uint32{443}, inForce().GetEgress().GetPorts())
	assert.Zero(t, inForce().Breakers[0].Rules[0].Share.Of, "other pods get its share")
	saved, err := r.Store.Policy("a")
	require.NoError(t, err)
	assert.Equal(t, []uint32{443}, saved.GetTraffic().GetEgress().GetPorts())
	assert.EqualValues(t, 1, traffic.Breakers[0].Rules[0].Share.Of, "what the manager said is not written to")

	traffic.Egress.Ports[0] = 8443
	setPolicy(t, r, &meshv1.PodPolicy{Uid: "a", Version: "none", Refuse: "no shard yet", Traffic: traffic})
	assert.Equal(t, []uint32{8443}, inForce().GetEgress().GetPorts(), "of a pod that is known they are the manager's")
	assert.EqualValues(t, 1, inForce().Breakers[0].Rules[0].Share.Of)

	setPolicy(t, r, &meshv1.PodPolicy{Uid: "a", Version: "free", Refuse: "no shard yet"})
	assert.True(t, proto.Equal(&meshv1.Traffic{}, inForce()), "and end when they are deleted: %s", inForce())
}

// A pod that is refused lacks rules of the apiserver's, and what they counted is not forgotten
// with the agent.
func TestCountsOfRefusedPodArePassedOn(t *testing.T) {
	r := start(t, 0)
	r.served(t, "a")
	setPolicy(t, r, &meshv1.PodPolicy{Uid: "a", Version: "x", Traffic: &meshv1.Traffic{
		Breakers: []*meshv1.Breaker{{Name: "cap", Rules: []*meshv1.LimitRule{{Name: "all", Key: "counted"}}}},
	}})
	setPolicy(t, r, &meshv1.PodPolicy{Uid: "a", Version: "none", Refuse: "no shard yet"})
	r.in(t, func() { assert.Contains(t, string(r.exportCounts(r.pods["a"].redirection.proxied)), "counted") })
}

func TestRefusalBarsItsSerial(t *testing.T) {
	r := start(t, 0)
	r.served(t, "a")
	setPolicy(t, r, &meshv1.PodPolicy{Uid: "a", Version: "7-x", Serial: 7})
	setPolicy(t, r, &meshv1.PodPolicy{Uid: "a", Version: "7-gone", Serial: 7, Refuse: "gone"})
	setPolicy(t, r, &meshv1.PodPolicy{Uid: "a", Version: "none", Refuse: "no shard yet"})
	for range 2 {
		_, err := r.SetPolicy(&meshv1.PodPolicy{Uid: "a", Version: "7-x", Serial: 7})
		require.ErrorContains(t, err, "may act on 8 or later")
		r = restarted(t, r)
	}
	setPolicy(t, r, &meshv1.PodPolicy{Uid: "a", Version: "8-x", Serial: 8})
}

func TestRemovedPolicyKeepsSerial(t *testing.T) {
	for what, remove := range map[string]func(*running){
		"removed":  func(r *running) { _, err := r.RemovePolicy("a"); require.NoError(t, err) },
		"unlisted": func(r *running) { r.Synced(nil) },
	} {
		r := start(t, 0)
		r.served(t, "a")
		setPolicy(t, r, &meshv1.PodPolicy{Uid: "a", Version: "1-x", Serial: 1})
		remove(r)
		next := restarted(t, r)
		for range 2 {
			_, err := next.SetPolicy(&meshv1.PodPolicy{Uid: "a", Version: "whole"})
			require.Error(t, err, what)
			remove(next)
		}
		setPolicy(t, next, &meshv1.PodPolicy{Uid: "a", Version: "1-y", Serial: 1})
	}
}

// crashed saves policies of pods as an agent does that dies then.
func crashed(t *testing.T, r *running, pods ...*meshv1.PodPolicy) {
	t.Helper()
	for _, p := range pods {
		require.NoError(t, r.Store.SavePolicy(state.Saved{PodPolicy: p, Since: time.Now()}))
	}
	r.in(t, func() {
		r.presence.restore(r.destinations, nil, nil)
		for _, p := range pods {
			r.pods[p.GetUid()].announced = time.Now()
		}
	})
}

// serveWithout puts a socket in place as an agent without a journal does, and dies.
func serveWithout(t *testing.T, path string) {
	t.Helper()
	socket, err := takeover.Listen(path, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	require.NoError(t, socket.Take())
	require.NoError(t, socket.Close())
}

// takesOver lets r serve, at once without its takeover socket, as if it had died.
func (r *running) takesOver(t *testing.T, path string) {
	t.Helper()
	r.in(t, func() {
		socket, err := r.TakeOver(t.Context(), path)
		if assert.NoError(t, err) {
			assert.NoError(t, socket.Close())
		}
	})
}

// The one that serves has the pods from disk, as they were.
func TestPredecessorAcksWhatSuccessorSaved(t *testing.T) {
	old := start(t, 0)
	old.served(t, "a")
	setPolicy(t, old, &meshv1.PodPolicy{Uid: "a", Version: "1-x", Serial: 1})
	_, err := old.Incumbent().Offer(t.Context())
	require.NoError(t, err)
	next := restarted(t, old)
	assert.Nil(t, setPolicy(t, old, &meshv1.PodPolicy{Uid: "a", Version: "1-x", Serial: 1}), "both know it")

	settled := setPolicy(t, old, &meshv1.PodPolicy{Uid: "a", Version: "2-x", Serial: 2})
	_, err = old.Incumbent().Yield(t.Context())
	require.NoError(t, err)
	old.soon(t, "another look", func() bool { old.effects.retry(); return true })
	assert.False(t, inflight.Closed(settled))
	assert.Empty(t, old.Versions()["a"])

	setPolicy(t, next, &meshv1.PodPolicy{Uid: "a", Version: "2-x", Serial: 2})
	old.soon(t, "the successor's", func() bool { return inflight.Closed(settled) })
	assert.Equal(t, map[string]string{"a": "2-x"}, old.Versions())
}

// The successor is lost: what was said meanwhile is saved now.
func TestResumeSavesPolicies(t *testing.T) {
	r := start(t, 0)
	r.served(t, "a")
	_, err := r.Incumbent().Offer(t.Context())
	require.NoError(t, err)
	settled := setPolicy(t, r, &meshv1.PodPolicy{Uid: "a", Version: "2-x", Serial: 2})
	assert.False(t, inflight.Closed(settled))

	require.NoError(t, r.Incumbent().Resume(t.Context()))
	<-settled
	saved, err := r.Store.Policy("a")
	require.NoError(t, err)
	assert.Equal(t, "2-x", saved.GetVersion())
}

// The next agent captures the pod under what is saved.
func TestPolicyOfUncapturedPodIsSaved(t *testing.T) {
	r := start(t, 0)
	require.NoError(t, r.Store.SavePolicy(state.Saved{PodPolicy: &meshv1.PodPolicy{Uid: "a", Version: "1-x", Serial: 1}, Since: state.Always}))
	require.NoError(t, r.do(t.Context(), func() error {
		r.presence.restore(r.destinations, nil, nil)
		r.pods["a"].announced = time.Now()
		return nil
	}))
	setPolicy(t, r, &meshv1.PodPolicy{Uid: "a", Version: "2-x", Serial: 2})
	setPolicy(t, r, &meshv1.PodPolicy{Uid: "unseen", Version: "3-x", Serial: 3})
	saved := func() map[string]state.Saved {
		_, all, err := r.Store.Load()
		require.NoError(t, err)
		byUID := map[string]state.Saved{}
		for _, p := range all {
			byUID[p.GetUid()] = p
		}
		return byUID
	}
	assert.Equal(t, "2-x", saved()["a"].GetVersion())
	assert.True(t, saved()["a"].Since.After(time.Now()), "its clients have not listed again")
	assert.Equal(t, "3-x", saved()["unseen"].GetVersion())

	r.Synced(map[string]bool{"a": true})
	assert.NotContains(t, saved(), "unseen")
}

func TestUnsavedPolicyIsNotAcked(t *testing.T) {
	r := start(t, 0)
	r.served(t, "a")
	dir := filepath.Join(t.TempDir(), "policies")
	store, err := state.Open(dir)
	require.NoError(t, err)
	require.NoError(t, os.RemoveAll(dir))
	require.NoError(t, r.do(t.Context(), func() error { r.Store = store; return nil }))

	_, err = r.SetPolicy(&meshv1.PodPolicy{Uid: "a", Version: "1-x", Serial: 1})
	require.ErrorContains(t, err, "is in force, but the next agent would not know")
	assert.Equal(t, map[string]string{"a": ""}, r.Versions())
	r.soon(t, "the policy", func() bool { return r.pods["a"].redirection.proxied.Version() == "1-x" })

	require.NoError(t, os.Mkdir(dir, 0o700))
	r.soon(t, "another try", func() bool { return r.version(r.pods["a"]) == "1-x" })
}
