package state

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

func TestStoreRestoresWhatWasSaved(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "policies")
	s, err := Open(dir)
	require.NoError(t, err)
	cluster := &meshv1.Cluster{Version: "1", ServiceAddresses: []string{"198.18.0.1:443"}}
	kept := &meshv1.PodPolicy{Uid: "a", Name: "pod", Version: "2", Sharding: &meshv1.Sharding{Shard: "s"}}
	require.NoError(t, s.SaveCluster(cluster))
	require.NoError(t, s.SavePolicy(Saved{PodPolicy: &meshv1.PodPolicy{Uid: "a", Version: "1"}, Since: time.Now()}))
	require.NoError(t, s.SavePolicy(Saved{PodPolicy: kept, Since: time.Now()}))
	require.NoError(t, s.SavePolicy(Saved{PodPolicy: &meshv1.PodPolicy{Uid: "b"}, Since: time.Now()}))
	require.NoError(t, s.DeletePolicy("b"))
	require.NoError(t, s.DeletePolicy("never-there"))

	again, err := Open(dir)
	require.NoError(t, err)
	gotCluster, policies, err := again.Load()

	require.NoError(t, err)
	assert.True(t, proto.Equal(cluster, gotCluster))
	require.Len(t, policies, 1)
	assert.True(t, proto.Equal(kept, policies[0].PodPolicy), "the last one saved counts")
}

func TestStoreReportsDamagedFiles(t *testing.T) {
	dir := t.TempDir()
	s, err := Open(dir)
	require.NoError(t, err)
	require.NoError(t, s.SavePolicy(Saved{PodPolicy: &meshv1.PodPolicy{Uid: "good"}, Since: time.Now()}))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "bad.policy.pb"), []byte{0xff, 0xff}, 0o600))

	_, policies, err := s.Load()

	assert.ErrorContains(t, err, "bad.policy.pb")
	require.Len(t, policies, 1)
	assert.Equal(t, "good", policies[0].GetUid())
}

// Without its end, a policy would restrict less.
func TestStoreRejectsTruncatedFiles(t *testing.T) {
	dir := t.TempDir()
	s, err := Open(dir)
	require.NoError(t, err)
	p := &meshv1.PodPolicy{Uid: "a", Version: "1", Sharding: &meshv1.Sharding{Shard: "s"}, Traffic: &meshv1.Traffic{Egress: &meshv1.Egress{Ports: []uint32{443}}}}
	good := &meshv1.Traffic{Breakers: []*meshv1.Breaker{{Name: "good"}}}
	require.NoError(t, s.SavePolicy(Saved{PodPolicy: p, InForce: good, Since: time.Now()}))
	path := filepath.Join(dir, "a.policy.pb")
	whole, err := os.ReadFile(path)
	require.NoError(t, err)
	for n := range whole {
		require.NoError(t, os.WriteFile(path, whole[:n], 0o600))
		_, policies, err := s.Load()
		require.ErrorContains(t, err, "a.policy.pb", "%d bytes", n)
		require.Empty(t, policies)
		_, err = s.Policy("a")
		require.Error(t, err, "%d bytes", n)
	}
	require.NoError(t, os.WriteFile(path, whole, 0o600))
	_, policies, err := s.Load()
	require.NoError(t, err)
	require.True(t, proto.Equal(p, policies[0].PodPolicy))
	require.True(t, proto.Equal(good, policies[0].InForce))
	// As earlier versions wrote it.
	b, err := proto.Marshal(p)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(path, b, 0o600))
	_, policies, err = s.Load()
	require.NoError(t, err)
	require.True(t, proto.Equal(p, policies[0].PodPolicy))
	require.Nil(t, policies[0].InForce)
	// As they will read it.
	require.NoError(t, proto.Unmarshal(whole, &meshv1.PodPolicy{}))
}

func TestStoreRejectsUIDsThatAreNoFileNames(t *testing.T) {
	s, err := Open(t.TempDir())
	require.NoError(t, err)
	for _, uid := range []string{"", "../x", "a/b", "a\x00b", string(make([]byte, 200))} {
		assert.Error(t, s.SavePolicy(Saved{PodPolicy: &meshv1.PodPolicy{Uid: uid}}), "%q", uid)
	}
}

func TestEqualPolicyKeepsItsSince(t *testing.T) {
	s, err := Open(t.TempDir())
	require.NoError(t, err)
	first, second := &meshv1.PodPolicy{Uid: "a", Version: "1"}, &meshv1.PodPolicy{Uid: "a", Version: "2"}
	since := func() time.Time {
		_, saved, err := s.Load()
		require.NoError(t, err)
		return saved[0].Since
	}
	require.NoError(t, s.SavePolicy(Saved{PodPolicy: first, Since: Always}))
	assert.True(t, since().Equal(Always))
	require.NoError(t, s.SavePolicy(Saved{PodPolicy: first, Since: time.Now()}))
	assert.True(t, since().Equal(Always), "it is still the same")
	require.NoError(t, s.SavePolicy(Saved{PodPolicy: second, Since: NotApplied}))
	assert.True(t, since().Equal(NotApplied))
	require.NoError(t, s.SavePolicy(Saved{PodPolicy: second, Since: time.Now()}))
	assert.WithinDuration(t, time.Now(), since(), time.Minute)
}
