package locks

import (
	"context"
	"errors"
	"log/slog"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

var (
	leader  = types.NamespacedName{Namespace: "ns", Name: "leader"}
	webhook = types.NamespacedName{Namespace: "kube-system", Name: "webhook"}
	config  = types.NamespacedName{Namespace: "ns", Name: "op"}
)

// cluster is an API server with one keeper after another.
type cluster struct {
	*testing.T
	client.Client
	*Keeper
	now     time.Time
	funcs   interceptor.Funcs
	orphans bool
	// owned is an object of each configuration. Others own nothing in common.
	owned map[types.NamespacedName]string
}

func (c *cluster) overlap(a, b types.NamespacedName) (string, bool) {
	if c.owned[a] == c.owned[b] {
		return c.owned[a], true
	}
	return "", true
}

func newCluster(t *testing.T, objects ...client.Object) *cluster {
	scheme := runtime.NewScheme()
	require.NoError(t, clientgoscheme.AddToScheme(scheme))
	c := &cluster{T: t, now: time.Unix(1e9, 0)}
	c.Client = fake.NewClientBuilder().WithScheme(scheme).WithObjects(objects...).WithInterceptorFuncs(interceptor.Funcs{
		Patch: func(ctx context.Context, w client.WithWatch, o client.Object, p client.Patch, opts ...client.PatchOption) error {
			if f := c.funcs.Patch; f != nil {
				return f(ctx, w, o, p, opts...)
			}
			return w.Patch(ctx, o, p, opts...)
		},
		Get: func(ctx context.Context, w client.WithWatch, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
			if f := c.funcs.Get; f != nil {
				return f(ctx, w, key, o, opts...)
			}
			return w.Get(ctx, key, o, opts...)
		},
	}).Build()
	c.lead()
	return c
}

// lead makes another manager the leader.
func (c *cluster) lead() {
	c.Keeper = &Keeper{Client: c.Client, Log: slog.New(slog.DiscardHandler), Now: func() time.Time { return c.now }}
}

// round is what a keeper does every two seconds.
func (c *cluster) round(demands ...Demand) State {
	c.Helper()
	c.now = c.now.Add(Every)
	_, err := c.Round(c.Context(), demands, func(types.NamespacedName) bool { return c.orphans }, c.overlap)
	require.NoError(c, err)
	s, _ := c.States(config)(leader)
	return s
}

func demand(mode Mode, locks ...types.NamespacedName) Demand {
	d := Demand{Config: config, Mode: mode}
	for _, l := range locks {
		d.Locks = append(d.Locks, Lock{NamespacedName: l})
	}
	return d
}

func lease(name types.NamespacedName, holder string, seconds int32) *coordinationv1.Lease {
	at := metav1.NewMicroTime(time.Unix(5e8, 0))
	return &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Namespace: name.Namespace, Name: name.Name},
		Spec:       coordinationv1.LeaseSpec{HolderIdentity: &holder, LeaseDurationSeconds: &seconds, RenewTime: &at, AcquireTime: &at},
	}
}

func (c *cluster) lease(name types.NamespacedName) *coordinationv1.Lease {
	l := &coordinationv1.Lease{}
	require.NoError(c, c.Get(c.Context(), name, l))
	return l
}

// renew is what a holder outside the mesh does.
func (c *cluster) renew(name types.NamespacedName) {
	l := c.lease(name)
	at := metav1.NewMicroTime(c.now)
	l.Spec.RenewTime = &at
	require.NoError(c, c.Update(c.Context(), l))
}

func TestFreeLockIsAcquiredAndRenewed(t *testing.T) {
	for name, objects := range map[string][]client.Object{
		"no lock":       nil,
		"released lock": {lease(leader, "", 1)},
	} {
		t.Run(name, func(t *testing.T) {
			c := newCluster(t, objects...)
			require.True(t, c.round(demand(Acquire, leader)).Held)
			l := c.lease(leader)
			require.Equal(t, "ctrlmesh:ns/op", *l.Spec.HolderIdentity)
			require.Equal(t, "true", l.Labels[v1alpha1.LockHeldLabel])
			require.Equal(t, "ns/op", l.Annotations[v1alpha1.LockHolderAnnotation])
			require.True(t, c.round(demand(Keep, leader)).Held)
			require.True(t, c.lease(leader).Spec.RenewTime.After(l.Spec.RenewTime.Time))
			require.Equal(t, l.Spec.AcquireTime, c.lease(leader).Spec.AcquireTime)

			c.lead()
			require.True(t, c.round(demand(Watch, leader)).Held, "the record says so")
		})
	}
}

// A lock is acquired when its record has not changed for its own duration, by the
// keeper's clock alone: the time in the record may be wrong.
func TestForeignLockIsAcquiredWhenItExpires(t *testing.T) {
	c := newCluster(t, lease(leader, "outside_1", 15))
	for range 10 {
		s := c.round(demand(Acquire, leader))
		require.False(t, s.Held)
		require.Equal(t, "outside_1", s.Holder)
		c.renew(leader)
	}
	died := c.now
	for !c.round(demand(Acquire, leader)).Held {
		require.Less(t, c.now.Sub(died), 20*time.Second)
	}
	require.GreaterOrEqual(t, c.now.Sub(died), 15*time.Second)
	require.EqualValues(t, 1, *c.lease(leader).Spec.LeaseTransitions)
}

func TestRecordThatNoClientWritesIsAProblem(t *testing.T) {
	c := newCluster(t, lease(leader, strings.Repeat("x", maxRecord), 1))
	s := c.round(demand(Acquire, leader))
	require.False(t, s.Held)
	require.Empty(t, s.Holder)
	require.Contains(t, s.Problem, "delete the object")
	require.NoError(t, c.Delete(t.Context(), c.lease(leader)))
	require.True(t, c.round(demand(Acquire, leader)).Held)
}

// What the mesh writes into a record may be longer than what it found there.
func TestRecordThatTheMeshMadeLongerIsKept(t *testing.T) {
	cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: leader.Namespace, Name: leader.Name, Annotations: map[string]string{
		resourcelock.LeaderElectionRecordAnnotationKey: `{"holderIdentity": "", "x": "` + strings.Repeat("<", maxRecord-100) + `"}`,
	}}}
	c := newCluster(t, cm)
	d := demand(Acquire, leader)
	d.Locks[0].Resources = []string{ConfigMaps}
	require.True(t, c.round(d).Held)
	d.Mode = Keep
	require.True(t, c.round(d).Held)
	c.lead()
	d.Mode = Watch
	require.True(t, c.round(d).Held, "another leader reads it")
}

func TestRecordThatIsWrittenMeanwhileIsNotOverwritten(t *testing.T) {
	c := newCluster(t, lease(leader, "", 1))
	c.funcs.Patch = func(ctx context.Context, w client.WithWatch, o client.Object, p client.Patch, opts ...client.PatchOption) error {
		c.funcs.Patch = nil
		l := c.lease(leader)
		other := "outside_2"
		l.Spec.HolderIdentity = &other
		require.NoError(t, w.Update(ctx, l))
		return w.Patch(ctx, o, p, opts...)
	}
	require.False(t, c.round(demand(Acquire, leader)).Held)
	require.Equal(t, "outside_2", *c.lease(leader).Spec.HolderIdentity)
	require.Equal(t, "outside_2", c.round(demand(Acquire, leader)).Holder)
}

// A pod outside the mesh that holds one of the locks may still want the others.
func TestLocksAreAcquiredTogetherOrNotAtAll(t *testing.T) {
	c := newCluster(t, lease(webhook, "outside_1", 15))
	require.False(t, c.round(demand(Acquire, leader, webhook)).Held)
	l := c.lease(webhook)
	*l.Spec.HolderIdentity = ""
	require.NoError(t, c.Update(t.Context(), l))
	require.True(t, c.round(demand(Acquire, leader, webhook)).Held)
	both, _ := c.States(config)(webhook)
	require.True(t, both.Held)
}

func TestLockIsAcquiredByItselfWhileShardsAct(t *testing.T) {
	c := newCluster(t, lease(webhook, "outside_1", 15))
	require.True(t, c.round(demand(Keep, leader, webhook)).Held)
	other, _ := c.States(config)(webhook)
	require.Equal(t, "outside_1", other.Holder)
}

// Who asks for a lock must know that the round before does not release it.
func TestStateNamesTheDemandThatWasFollowed(t *testing.T) {
	c := newCluster(t)
	d := demand(Keep, leader)
	d.Asked = 3
	require.EqualValues(t, 3, c.round(d).Asked)
	d.Mode, d.Asked = Release, 0
	require.Zero(t, c.round(d).Asked)
}

func TestLockIsReleasedOnceNobodyNeedsIt(t *testing.T) {
	c := newCluster(t)
	other := demand(Acquire, leader)
	other.Config.Name = "another"
	require.True(t, c.round(demand(Acquire, leader), other).Held)
	require.True(t, c.round(demand(Release, leader), other).Held, "another configuration needs it")
	require.False(t, c.round(demand(Watch, leader)).Held, "pods of the other may still act")
	c.orphans = true
	require.True(t, c.round(demand(Watch, leader)).Held, "it is not known that no pod acts")
	require.False(t, c.round(demand(Release, leader)).Held)
	l := c.lease(leader)
	require.Empty(t, *l.Spec.HolderIdentity)
	require.NotContains(t, l.Labels, v1alpha1.LockHeldLabel)
	require.NotContains(t, l.Annotations, v1alpha1.LockHolderAnnotation)
}

// A restored backup may say that the mesh holds a lock that a pod outside acquired since.
func TestLockThatBearsTheMeshsNameIsProvenAnew(t *testing.T) {
	c := newCluster(t)
	require.True(t, c.round(demand(Acquire, leader)).Acquired)
	require.True(t, c.round(demand(Keep, leader)).Acquired)

	c.lead()
	c.now = c.now.Add(leaseDuration)
	start := c.now
	for s := c.round(demand(Keep, leader)); !s.Acquired; s = c.round(demand(Keep, leader)) {
		require.True(t, s.Held)
		require.Less(t, c.now.Sub(start), 2*provenAfter)
	}
	require.GreaterOrEqual(t, c.now.Sub(start), provenAfter)

	backup := c.lease(leader)
	for range 40 {
		require.True(t, c.round(demand(Keep, leader)).Acquired)
	}
	require.NoError(t, c.Delete(t.Context(), backup))
	backup.ResourceVersion = ""
	require.NoError(t, c.Create(t.Context(), backup))
	backup.Labels["restored"] = "true"
	require.NoError(t, c.Update(t.Context(), backup))
	c.round(demand(Keep, leader))
	s := c.round(demand(Keep, leader))
	require.True(t, s.Held)
	require.False(t, s.Acquired, "the record is another than the one that was renewed")
}

// A manager that is killed, or whose renewal fails, delays nothing: the record shows that the
// mesh has renewed it a moment ago.
func TestLockThatWasRenewedRecentlyIsAcquiredAtOnce(t *testing.T) {
	for name, interrupt := range map[string]func(c *cluster){
		"another manager": (*cluster).lead,
		"a renewal that failed": func(c *cluster) {
			c.funcs.Patch = func(context.Context, client.WithWatch, client.Object, client.Patch, ...client.PatchOption) error {
				return errors.New("the apiserver is away")
			}
			c.round(demand(Acquire, leader))
			c.funcs.Patch = nil
		},
		"a renewal of which the answer was lost": func(c *cluster) {
			c.funcs.Patch = func(ctx context.Context, w client.WithWatch, o client.Object, p client.Patch, opts ...client.PatchOption) error {
				require.NoError(c, w.Patch(ctx, o, p, opts...))
				return errors.New("timeout")
			}
			c.round(demand(Acquire, leader))
			c.funcs.Patch = nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := newCluster(t)
			require.True(t, c.round(demand(Acquire, leader)).Acquired)
			interrupt(c)
			for range 2 {
				c.round(demand(Acquire, leader))
			}
			s, _ := c.States(config)(leader)
			require.True(t, s.Acquired)
		})
	}
}

// The mesh was removed and installed again: a label that it left would keep the holder
// from renewing.
func TestLabelThatWasLeftIsRemoved(t *testing.T) {
	left := lease(leader, "outside_1", 15)
	left.Labels = map[string]string{v1alpha1.LockHeldLabel: "true", "other": "kept"}
	for name, demands := range map[string][]Demand{"no configuration": nil, "one that waits": {demand(Acquire, leader)}, "one that acts": {demand(Keep, leader)}} {
		t.Run(name, func(t *testing.T) {
			c := newCluster(t, left.DeepCopy())
			c.round(demands...)
			l := c.lease(leader)
			require.Equal(t, map[string]string{"other": "kept"}, l.Labels)
			require.Equal(t, left.Spec.HolderIdentity, l.Spec.HolderIdentity)
		})
	}
}

// Another manager may lead by now, for which shards act.
func TestLockThatAnotherManagerRenewedIsNotReleased(t *testing.T) {
	c := newCluster(t)
	require.True(t, c.round(demand(Acquire, leader)).Held)
	old := c.Keeper
	c.lead()
	require.True(t, c.round(demand(Keep, leader)).Held)
	c.Keeper = old
	for range 3 {
		c.round(demand(Release, leader))
		require.Equal(t, "ctrlmesh:ns/op", *c.lease(leader).Spec.HolderIdentity)
	}
}

// Configurations may be deleted while no manager runs.
func TestLockThatNobodyNamesIsReleased(t *testing.T) {
	for name, restarted := range map[string]bool{"same manager": false, "another manager": true} {
		t.Run(name, func(t *testing.T) {
			c := newCluster(t)
			c.round(demand(Keep, leader))
			if restarted {
				c.lead()
				c.now = c.now.Add(leaseDuration)
			}
			require.True(t, c.round().Held, "its members may still act")
			c.orphans = true
			if c.round(); restarted {
				require.NotEmpty(t, *c.lease(leader).Spec.HolderIdentity, "a pod outside the mesh may still believe that it leads")
				c.now = c.now.Add(provenAfter)
				c.round()
			}
			require.Empty(t, *c.lease(leader).Spec.HolderIdentity)
		})
	}
}

func TestLocksOfOlderKindsAreHeldAsWell(t *testing.T) {
	old := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: leader.Namespace, Name: leader.Name, Annotations: map[string]string{
		resourcelock.LeaderElectionRecordAnnotationKey: `{"holderIdentity":"outside_1","leaseDurationSeconds":15,"renewTime":"2026-01-01T00:00:00Z","strategy":"S"}`,
	}}, Data: map[string]string{"kept": "as it is"}}
	c := newCluster(t, old)
	require.Equal(t, "outside_1", c.round(demand(Acquire, leader)).Holder)
	c.now = c.now.Add(20 * time.Second)
	s := c.round(demand(Acquire, leader))
	require.True(t, s.Held)
	require.Equal(t, []string{ConfigMaps, Leases}, s.Resources)
	require.NoError(t, c.Get(t.Context(), leader, old))
	require.Contains(t, old.Annotations[resourcelock.LeaderElectionRecordAnnotationKey], `"holderIdentity":"ctrlmesh:ns/op"`)
	require.Contains(t, old.Annotations[resourcelock.LeaderElectionRecordAnnotationKey], `"strategy":"S"`)
	require.Equal(t, "true", old.Labels[v1alpha1.LockHeldLabel])
	require.Equal(t, map[string]string{"kept": "as it is"}, old.Data)
	require.Error(t, c.Get(t.Context(), leader, &corev1.Endpoints{}), "nobody uses one") //nolint:staticcheck // old clients do

	observed := demand(Keep, leader)
	observed.Locks[0].Resources = []string{Endpoints}
	require.True(t, c.round(observed).Held)
	require.NoError(t, c.Get(t.Context(), leader, &corev1.Endpoints{})) //nolint:staticcheck // old clients do
}

// The Python client writes the lease duration as a string.
func TestDurationInAStringIsObserved(t *testing.T) {
	python := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: leader.Namespace, Name: leader.Name, Annotations: map[string]string{
		resourcelock.LeaderElectionRecordAnnotationKey: `{"holderIdentity": "outside_1", "leaseDurationSeconds": "40", "renewTime": "2026-01-01 00:00:00.000001"}`,
	}}}
	c := newCluster(t, python)
	require.Equal(t, "outside_1", c.round(demand(Acquire, leader)).Holder)
	c.now = c.now.Add(30 * time.Second)
	require.False(t, c.round(demand(Acquire, leader)).Held, "the holder may still lead")
	c.now = c.now.Add(15 * time.Second)
	require.True(t, c.round(demand(Acquire, leader)).Held)
}

func TestFailuresDoNotLoseALock(t *testing.T) {
	c := newCluster(t)
	require.True(t, c.round(demand(Acquire, leader)).Held)
	c.funcs.Patch = func(context.Context, client.WithWatch, client.Object, client.Patch, ...client.PatchOption) error {
		return errors.New("the apiserver is away")
	}
	c.funcs.Get = func(context.Context, client.WithWatch, client.ObjectKey, client.Object, ...client.GetOption) error {
		return errors.New("the apiserver is away")
	}
	for range 3 {
		require.True(t, c.round(demand(Keep, leader)).Held)
	}
	c.lead()
	s := c.round(demand(Acquire, leader))
	require.False(t, s.Held)
	require.Contains(t, s.Problem, "the apiserver is away")
}

// An administrator releases a lock by removing its label. As long as nobody has acquired
// it, the mesh may take it back.
func TestLockWithoutLabelIsTakenBack(t *testing.T) {
	c := newCluster(t, lease(leader, "ctrlmesh:ns/op", 15))
	require.False(t, c.round(demand(Watch, leader)).Held)
	require.True(t, c.round(demand(Keep, leader)).Held)
	require.Equal(t, "true", c.lease(leader).Labels[v1alpha1.LockHeldLabel])
}

// By naming a lock elsewhere, nobody gets more than the pods may do anyway.
func TestLockOfAnotherNamespaceNeedsRightsOfThePods(t *testing.T) {
	c := newCluster(t)
	c.May = func(_ context.Context, account types.NamespacedName, _ string, lock types.NamespacedName) (bool, error) {
		return account == types.NamespacedName{Namespace: "ns", Name: "allowed"} && lock == webhook, nil
	}
	d := demand(Acquire, webhook)
	c.round(d)
	s, _ := c.States(config)(webhook)
	require.Contains(t, s.Problem, "no pod of ShardingConfig ns/op may update Lease kube-system/webhook")
	d.Accounts = []string{"other"}
	c.round(d)
	s, _ = c.States(config)(webhook)
	require.False(t, s.Held)
	d.Accounts = append(d.Accounts, "allowed")
	c.now = c.now.Add(authorizedFor)
	c.round(d)
	s, _ = c.States(config)(webhook)
	require.True(t, s.Held)
}

func TestPodsOfManyAccountsAreNotReviewed(t *testing.T) {
	c := newCluster(t)
	c.May = func(context.Context, types.NamespacedName, string, types.NamespacedName) (bool, error) {
		return true, nil
	}
	d := demand(Acquire, webhook)
	for i := range MaxAccounts + 1 {
		d.Accounts = append(d.Accounts, strconv.Itoa(i))
	}
	c.round(d)
	s, _ := c.States(config)(webhook)
	require.Contains(t, s.Problem, "more than 16")
	d.Accounts = d.Accounts[:MaxAccounts]
	c.now = c.now.Add(authorizedFor)
	c.round(d)
	s, _ = c.States(config)(webhook)
	require.True(t, s.Held)
}

// A pod reports a lock by trying to acquire it, before the apiserver has authorized that.
func TestDiscoveredLockNeedsRightsOfThePods(t *testing.T) {
	c := newCluster(t)
	may := map[string]bool{Leases: true}
	c.May = func(_ context.Context, _ types.NamespacedName, resource string, _ types.NamespacedName) (bool, error) {
		return may[resource], nil
	}
	d := Demand{Config: config, Mode: Acquire, Accounts: []string{"sa"}, Locks: []Lock{{NamespacedName: leader, Resources: []string{ConfigMaps, Leases}, Discovered: true}}}
	c.round(d)
	s, _ := c.States(config)(leader)
	require.False(t, s.Held)
	require.Contains(t, s.Problem, "no pod of ShardingConfig ns/op may update ConfigMap ns/leader and Lease ns/leader")
	require.True(t, c.Refuses(config, leader))

	may[ConfigMaps] = true
	c.now = c.now.Add(authorizedFor)
	c.round(d)
	s, _ = c.States(config)(leader)
	require.True(t, s.Held)
	require.Equal(t, []string{ConfigMaps, Leases}, s.Resources)

	may[ConfigMaps] = false // shards may act
	c.now = c.now.Add(authorizedFor)
	d.Mode = Keep
	c.round(d)
	s, _ = c.States(config)(leader)
	require.True(t, s.Held)
}

// Of two configurations that have one lock and own one object, the one that acts has the lock.
func TestOneOfTwoThatOverlapHasTheLock(t *testing.T) {
	a, b, other := types.NamespacedName{Namespace: "ns", Name: "a"}, types.NamespacedName{Namespace: "ns", Name: "b"}, types.NamespacedName{Namespace: "ns", Name: "other"}
	of := func(config types.NamespacedName, mode Mode) Demand {
		return Demand{Config: config, Mode: mode, Locks: []Lock{{NamespacedName: leader}}}
	}
	held := func(c *cluster, config types.NamespacedName) bool {
		s, _ := c.States(config)(leader)
		return s.Held
	}
	c := newCluster(t)
	c.owned = map[types.NamespacedName]string{a: "foos", b: "foos", other: "bars"}
	c.round(of(b, Acquire))
	for _, lead := range []bool{false, true} {
		if lead {
			c.lead()
		}
		for _, mode := range []Mode{Acquire, Keep} {
			c.round(of(a, mode), of(b, Keep), of(other, mode))
			require.True(t, held(c, b), "its shards act")
			require.True(t, held(c, other), "it owns other objects")
			require.False(t, held(c, a))
			s, _ := c.States(a)(leader)
			require.Contains(t, s.Problem, "ShardingConfig ns/b has it, and both would own foos")
		}
	}
	c.round(of(a, Acquire), of(b, Watch), of(other, Keep))
	require.False(t, held(c, a), "b may act")
	c.round(of(a, Release), of(b, Keep), of(other, Keep))
	require.False(t, held(c, a), "what b holds is not held for a")

	// b releases the lock, and other goes on.
	for range 3 {
		c.round(of(a, Acquire), of(b, Release), of(other, Keep))
	}
	require.True(t, held(c, a))
	require.True(t, held(c, other))
	require.Equal(t, "ctrlmesh:ns/other", *c.lease(leader).Spec.HolderIdentity, "it acted when b released the lock")
	require.Equal(t, "ns/other", c.lease(leader).Annotations[v1alpha1.LockHolderAnnotation])
	c.lead()
	byStatus := of(a, Acquire)
	byStatus.Locks[0].Held = true
	c.round(byStatus, of(b, Acquire), of(other, Acquire))
	require.True(t, held(c, a))
	require.False(t, held(c, b))

	// a is deleted while its pods act.
	for range 3 {
		c.round(of(b, Acquire), of(other, Keep))
		require.False(t, held(c, b))
		require.True(t, held(c, other))
	}
	c.round(of(b, Release), of(other, Release))
	require.NotEmpty(t, *c.lease(leader).Spec.HolderIdentity, "pods may act for a")
	c.orphans = true
	c.round(of(b, Acquire), of(other, Keep))
	require.True(t, held(c, b))
}

func TestContest(t *testing.T) {
	name := func(n string) types.NamespacedName { return types.NamespacedName{Namespace: "ns", Name: n} }
	a, b := name("a"), name("b")
	same := func(types.NamespacedName, types.NamespacedName) (string, bool) { return "foos", true }
	unknown := func(types.NamespacedName, types.NamespacedName) (string, bool) { return "", false }
	for _, c := range []struct {
		says       string
		contenders []contender
		overlap    Overlap
		winners    []types.NamespacedName
		loser      types.NamespacedName
	}{
		{"the first by name", []contender{{config: b, may: true}, {config: a, may: true}}, same, []types.NamespacedName{a}, b},
		{"whose pods may act", []contender{{config: b, had: true}, {config: a, may: true}}, same, []types.NamespacedName{b}, a},
		{"for which it is held", []contender{{config: b, holds: true}, {config: a, had: true}}, same, []types.NamespacedName{b}, a},
		{"one that could not have it now keeps nobody from it", []contender{{config: b, may: true}, {config: a}}, same, []types.NamespacedName{b}, a},
		{"not compared yet", []contender{{config: b, may: true}, {config: a, may: true}}, unknown, []types.NamespacedName{a}, b},
		{"those that had it go on while they are compared", []contender{{config: b, had: true}, {config: a, had: true}}, unknown, []types.NamespacedName{a, b}, types.NamespacedName{}},
	} {
		winners, losers := contest(c.contenders, nil, c.overlap)
		require.Equal(t, c.winners, winners, c.says)
		if c.loser.Name == "" {
			require.Empty(t, losers, c.says)
		} else {
			require.Contains(t, losers, c.loser, c.says)
		}
	}
}

// operator may update its lock in kube-system; tenant names the lock, and may not.
var (
	operator = types.NamespacedName{Namespace: "op-system", Name: "op"}
	tenant   = types.NamespacedName{Namespace: "aaa-tenant", Name: "x"}
)

func ofOperator(c *cluster) func(config types.NamespacedName, mode Mode) Demand {
	c.May = func(_ context.Context, account types.NamespacedName, _ string, _ types.NamespacedName) (bool, error) {
		return account.Namespace == operator.Namespace, nil
	}
	return func(config types.NamespacedName, mode Mode) Demand {
		return Demand{Config: config, Mode: mode, Locks: []Lock{{NamespacedName: webhook}}, Accounts: []string{"sa"}}
	}
}

func TestLockIsAcquiredBesideADemandWithoutPermission(t *testing.T) {
	c := newCluster(t)
	of := ofOperator(c)
	for _, mode := range []Mode{Release, Watch, Acquire, Keep} {
		c.round(of(tenant, mode), of(operator, Acquire))
		s, _ := c.States(operator)(webhook)
		require.True(t, s.Held, mode)
		s, _ = c.States(tenant)(webhook)
		require.False(t, s.Held || s.Acquired, mode)
		require.True(t, c.Refuses(tenant, webhook), mode)
		require.False(t, c.Refuses(operator, webhook), mode)
	}
}

func TestLockIsReleasedBesideADemandWithoutPermission(t *testing.T) {
	c := newCluster(t)
	of := ofOperator(c)
	c.round(of(operator, Keep))
	for range 20 {
		c.round(of(operator, Keep), of(tenant, Acquire))
	}
	require.Equal(t, "ctrlmesh:op-system/op", *c.lease(webhook).Spec.HolderIdentity)
	for _, mode := range []Mode{Keep, Watch, Acquire} {
		for range 40 {
			c.round(of(operator, Release), of(tenant, mode))
		}
		require.Empty(t, *c.lease(webhook).Spec.HolderIdentity, mode)
	}
}

// The configuration that the lock was acquired for was deleted, and its members may still act.
func TestLockOfActingPodsStaysBesideADemandWithoutPermission(t *testing.T) {
	c := newCluster(t)
	of := ofOperator(c)
	c.round(of(operator, Keep))
	for _, mode := range []Mode{Keep, Watch, Acquire, Release} {
		c.round(of(tenant, mode))
		require.Equal(t, "ctrlmesh:op-system/op", *c.lease(webhook).Spec.HolderIdentity, mode)
	}
	c.orphans = true
	c.round(of(tenant, Keep))
	require.Empty(t, *c.lease(webhook).Spec.HolderIdentity)
}

// Shards that act keep their lock whatever becomes of the permission of their pods.
func TestKeptLockNeedsNoPermission(t *testing.T) {
	c := newCluster(t)
	of := ofOperator(c)
	other := types.NamespacedName{Namespace: operator.Namespace, Name: "other"} // shares the lock
	c.round(of(operator, Keep), of(other, Keep))
	c.May = func(context.Context, types.NamespacedName, string, types.NamespacedName) (bool, error) {
		return false, nil
	}
	c.now = c.now.Add(2 * authorizedFor)
	c.round(of(operator, Release), of(other, Keep))
	require.NotEmpty(t, *c.lease(webhook).Spec.HolderIdentity)
	c.round(of(other, Keep))
	s, _ := c.States(other)(webhook)
	require.True(t, s.Held)
}
