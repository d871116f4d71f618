package node

import (
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	eventsv1 "k8s.io/api/events/v1"

	"github.com/ctrlmesh/ctrlmesh/agent/inflight"
	"github.com/ctrlmesh/ctrlmesh/agent/journal"
	"github.com/ctrlmesh/ctrlmesh/agent/state"
	"github.com/ctrlmesh/ctrlmesh/agent/takeover"
	"github.com/ctrlmesh/ctrlmesh/agent/telemetry"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/stall"
)

func TestCrashWithoutJournalDelaysAllPods(t *testing.T) {
	r := start(t, 0)
	began := time.Now()
	crashed(t, r, &meshv1.PodPolicy{Uid: "a", Version: "1-x", Serial: 1, Sharding: &meshv1.Sharding{RequestTimeoutSeconds: 2}})
	assert.Empty(t, r.Versions()["a"])

	settled := setPolicy(t, r, &meshv1.PodPolicy{Uid: "a", Version: "2-x", Serial: 2})
	require.NotNil(t, settled)
	<-settled
	assert.GreaterOrEqual(t, time.Since(began), 2*time.Second+meshv1.LostWrite)
	assert.Equal(t, map[string]string{"a": "2-x"}, r.Versions())
}

// Hand-written shards have no serials: they hand objects over by versions.
func TestCrashHidesVersionsOfShards(t *testing.T) {
	r := start(t, 0)
	crashed(t, r, &meshv1.PodPolicy{Uid: "shard", Version: "1-x", Sharding: &meshv1.Sharding{}}, &meshv1.PodPolicy{Uid: "none", Version: "1-x"})
	assert.Equal(t, map[string]string{"shard": "", "none": "1-x"}, r.Versions())
}

func TestCrashDelaysOnlyPodsThatWereWriting(t *testing.T) {
	const unseen = time.Second
	journals := t.TempDir()
	before, err := journal.Create(journals)
	require.NoError(t, err)
	before.Serving(takeover.ID{1, 1})
	writing, idle := before.Pod("writing"), before.Pod("idle")
	for _, p := range []*journal.Pod{writing, idle} {
		p.Unseen(unseen)
		p.Begin()
	}
	idle.End()
	before.Abandon()

	r := startIn(t, journals, 0)
	began, late := time.Now(), stall.Measure(t)
	crashed(t, r,
		&meshv1.PodPolicy{Uid: "writing", Version: "1-x", Serial: 1}, &meshv1.PodPolicy{Uid: "idle", Version: "1-x", Serial: 1},
		&meshv1.PodPolicy{Uid: "open", Version: "1-x", Serial: 1, FailOpen: true})
	assert.Nil(t, setPolicy(t, r, &meshv1.PodPolicy{Uid: "idle", Version: "2-x", Serial: 2}), "its writes had ended")
	assert.False(t, inflight.Closed(setPolicy(t, r, &meshv1.PodPolicy{Uid: "open", Version: "2-x", Serial: 2})), "its writes passed no agent")
	settled := setPolicy(t, r, &meshv1.PodPolicy{Uid: "writing", Version: "2-x", Serial: 2})
	require.False(t, inflight.Closed(settled))
	assert.Equal(t, map[string]string{"idle": "2-x", "open": "", "writing": ""}, r.Versions())
	<-settled
	assert.GreaterOrEqual(t, time.Since(began), unseen)
	assert.Less(t, time.Since(began)-late.Total(), meshv1.LostWrite)
}

func TestUnknownWritesOutliveTheNextAgent(t *testing.T) {
	for name, before := range map[string]func(t *testing.T, journals string) (drained chan struct{}, policy *meshv1.PodPolicy){
		"after a crash without a journal": func(*testing.T, string) (chan struct{}, *meshv1.PodPolicy) {
			return nil, &meshv1.PodPolicy{Uid: "a", Version: "1-x", Serial: 1}
		},
		"while an agent without a journal drains": func(*testing.T, string) (chan struct{}, *meshv1.PodPolicy) {
			return make(chan struct{}), &meshv1.PodPolicy{Uid: "a", Version: "1-x", Serial: 1}
		},
		"after a crash with a pod that fails open": func(t *testing.T, journals string) (chan struct{}, *meshv1.PodPolicy) {
			idle, err := journal.Create(journals)
			require.NoError(t, err)
			idle.Serving(takeover.ID{1, 1})
			idle.Abandon()
			return nil, &meshv1.PodPolicy{Uid: "a", Version: "1-x", Serial: 1, FailOpen: true}
		},
	} {
		t.Run(name, func(t *testing.T) {
			journals := t.TempDir()
			drained, saved := before(t, journals)
			second := startIn(t, journals, 0)
			require.NoError(t, second.Store.SavePolicy(state.Saved{PodPolicy: saved, Since: time.Now()}))
			second.in(t, func() { second.presence.restore(second.destinations, nil, drained) })
			second.Journal.Abandon()

			third := startIn(t, journals, 0)
			third.in(t, func() { third.earlier.Predecessor = second.earlier.Own })
			saved.FailOpen = false
			crashed(t, third, saved)
			assert.False(t, inflight.Closed(setPolicy(t, third, &meshv1.PodPolicy{Uid: "a", Version: "2-x", Serial: 2})))
		})
	}
}

func TestOnlyTheJournalOfTheLastAgentCounts(t *testing.T) {
	for name, tt := range map[string]struct {
		between func(t *testing.T, journals, path string)
		waits   bool
	}{
		"nobody served in between":               {func(*testing.T, string, string) {}, false},
		"an agent without a journal was between": {func(t *testing.T, _, path string) { serveWithout(t, path) }, true},
		"and one that never served": {func(t *testing.T, journals, path string) {
			serveWithout(t, path)
			killed, err := journal.Create(journals)
			require.NoError(t, err)
			killed.Abandon()
		}, true},
	} {
		t.Run(name, func(t *testing.T) {
			journals, path := t.TempDir(), filepath.Join(t.TempDir(), "agent.sock")
			first := startIn(t, journals, 0)
			first.takesOver(t, path)
			first.Journal.Pod("b").Close()
			first.Journal.Abandon()
			tt.between(t, journals, path)

			next := startIn(t, journals, 0)
			require.NoError(t, next.Store.SavePolicy(state.Saved{PodPolicy: &meshv1.PodPolicy{Uid: "a", Version: "1-x", Serial: 1}, Since: time.Now()}))
			next.takesOver(t, path)
			settled := setPolicy(t, next, &meshv1.PodPolicy{Uid: "a", Version: "2-x", Serial: 2})
			assert.Equal(t, tt.waits, settled != nil && !inflight.Closed(settled))
		})
	}
}

func TestTakeoverPassesDeadlinesOfWrites(t *testing.T) {
	const left = time.Second
	journals := t.TempDir()
	old, err := journal.Create(journals)
	require.NoError(t, err)
	old.Serving(takeover.ID{1, 1})
	t.Cleanup(old.Abandon)
	lost, quiet := old.Pod("lost"), old.Pod("quiet")

	r := startIn(t, journals, 0)
	for _, uid := range []string{"lost", "quiet"} {
		require.NoError(t, r.Store.SavePolicy(state.Saved{PodPolicy: &meshv1.PodPolicy{Uid: uid, Version: "1-x", Serial: 1}, Since: time.Now()}))
	}
	r.in(t, func() {
		r.presence.restore(r.destinations, []takeover.Pod{{UID: "lost", Version: "1-x", Journaled: true}, {UID: "quiet", Version: "1-x", Journaled: true}}, make(chan struct{}))
		for _, mb := range r.pods {
			mb.announced = time.Now()
		}
	})
	settled := map[string]<-chan struct{}{}
	for _, uid := range []string{"lost", "quiet"} {
		assert.Nil(t, setPolicy(t, r, &meshv1.PodPolicy{Uid: uid, Version: "1-x", Serial: 1}), "the old agent confirmed it")
		settled[uid] = setPolicy(t, r, &meshv1.PodPolicy{Uid: uid, Version: "2-x", Serial: 2})
	}
	time.Sleep(100 * time.Millisecond)
	assert.False(t, inflight.Closed(settled["quiet"]), "the old agent serves its connections")

	began, late := time.Now(), stall.Measure(t)
	lost.Begin()
	lost.Lose(left)
	lost.Close()
	quiet.Close()
	<-settled["quiet"]
	assert.Less(t, time.Since(began)-late.Total(), left, "nothing of it was lost")
	<-settled["lost"]
	assert.GreaterOrEqual(t, time.Since(began), left)
}

func TestAgentServesWithoutRoomForAJournal(t *testing.T) {
	run := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(run, "journal"), nil, 0o600)) // where the folder should be
	var recorded []string
	events := telemetry.NewRecorder(func(e *eventsv1.Event) { recorded = append(recorded, e.Reason) }, "node1")
	writes := OpenJournal(filepath.Join(run, "journal"), events, slog.New(slog.DiscardHandler))
	assert.Equal(t, []string{"JournalUnavailable"}, recorded)

	path := filepath.Join(run, "agent.sock")
	first := start(t, 0)
	first.in(t, func() { first.Journal, first.earlier = writes, inflight.New(writes, first.Logger) })
	first.takesOver(t, path)

	require.NoError(t, os.Remove(filepath.Join(run, "journal")))
	next := startIn(t, filepath.Join(run, "journal"), 0)
	require.NoError(t, next.Store.SavePolicy(state.Saved{PodPolicy: &meshv1.PodPolicy{Uid: "a", Version: "1-x", Serial: 1}, Since: time.Now()}))
	next.takesOver(t, path)
	assert.False(t, inflight.Closed(setPolicy(t, next, &meshv1.PodPolicy{Uid: "a", Version: "2-x", Serial: 2})))
}

func TestResumeWaitsForWritesOfTheSuccessor(t *testing.T) {
	const unseen = time.Second
	journals := t.TempDir()
	r := startIn(t, journals, 0)
	for _, uid := range []string{"writing", "idle"} {
		r.served(t, uid)
		setPolicy(t, r, &meshv1.PodPolicy{Uid: uid, Version: "1-x", Serial: 1})
	}
	_, err := r.Incumbent().Offer(t.Context())
	require.NoError(t, err)
	successor, err := journal.Create(journals)
	require.NoError(t, err)
	writing := successor.Pod("writing")
	writing.Unseen(unseen)
	writing.Begin()
	successor.Pod("idle")
	meanwhile := setPolicy(t, r, &meshv1.PodPolicy{Uid: "writing", Version: "2-x", Serial: 2})
	successor.Abandon()
	began, late := time.Now(), stall.Measure(t)
	require.NoError(t, r.Incumbent().Resume(t.Context()))

	assert.Nil(t, setPolicy(t, r, &meshv1.PodPolicy{Uid: "idle", Version: "2-x", Serial: 2}))
	assert.Equal(t, map[string]string{"idle": "2-x", "writing": ""}, r.Versions())
	assert.False(t, inflight.Closed(setPolicy(t, r, &meshv1.PodPolicy{Uid: "writing", Version: "3-x", Serial: 3})))
	<-meanwhile
	assert.GreaterOrEqual(t, time.Since(began), unseen)
	assert.Less(t, time.Since(began)-late.Total(), meshv1.LostWrite)
	assert.Equal(t, map[string]string{"idle": "2-x", "writing": "3-x"}, r.Versions())
}

func TestResumeAfterAnotherJournalFormatDelaysAllPods(t *testing.T) {
	journals := t.TempDir()
	r := startIn(t, journals, 0)
	r.served(t, "a")
	setPolicy(t, r, &meshv1.PodPolicy{Uid: "a", Version: "1-x", Serial: 1})
	setPolicy(t, r, &meshv1.PodPolicy{Uid: "unseen", Version: "1-x", Serial: 1})
	_, err := r.Incumbent().Offer(t.Context())
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(journals, "other.journal"), nil, 0o600))
	require.NoError(t, r.Incumbent().Resume(t.Context()))
	for _, uid := range []string{"a", "unseen"} {
		assert.False(t, inflight.Closed(setPolicy(t, r, &meshv1.PodPolicy{Uid: uid, Version: "2-x", Serial: 2})))
	}
}

// What the old agent has under way is within what it confirmed, and no other.
func TestSuccessorAcksAfterPredecessorDrained(t *testing.T) {
	r := start(t, 0)
	sharding := &meshv1.Sharding{RequestTimeoutSeconds: 1}
	require.NoError(t, r.Store.SavePolicy(state.Saved{PodPolicy: &meshv1.PodPolicy{Uid: "a", Version: "2-x", Serial: 2, Sharding: sharding}, Since: time.Now()}))
	drained := make(chan struct{})
	require.NoError(t, r.do(t.Context(), func() error {
		r.presence.restore(r.destinations, []takeover.Pod{{UID: "a", Version: "2-x"}}, drained)
		r.pods["a"].announced = time.Now()
		return nil
	}))
	assert.Equal(t, map[string]string{"a": "2-x"}, r.Versions())
	assert.Nil(t, setPolicy(t, r, &meshv1.PodPolicy{Uid: "a", Version: "2-x", Serial: 2}))

	settled := setPolicy(t, r, &meshv1.PodPolicy{Uid: "a", Version: "3-x", Serial: 3})
	assert.Equal(t, map[string]string{"a": "2-x"}, r.Versions())
	began := time.Now()
	close(drained)
	<-settled
	assert.GreaterOrEqual(t, time.Since(began), time.Second+meshv1.LostWrite, "it may have died, and has no journal")
	assert.Equal(t, map[string]string{"a": "3-x"}, r.Versions())
}
