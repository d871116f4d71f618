package traffic

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/manager/apiserver"
	"github.com/ctrlmesh/ctrlmesh/manager/controllers"
	"github.com/ctrlmesh/ctrlmesh/manager/controllers/policy"
	"github.com/ctrlmesh/ctrlmesh/manager/controllers/share"
	"github.com/ctrlmesh/ctrlmesh/manager/internal/testenv"
	"github.com/ctrlmesh/ctrlmesh/manager/locks"
	"github.com/ctrlmesh/ctrlmesh/manager/platform"
	"github.com/ctrlmesh/ctrlmesh/manager/push"
	"github.com/ctrlmesh/ctrlmesh/manager/resources"
	"github.com/ctrlmesh/ctrlmesh/manager/roots"
)

// sharesPatience is how long policies wait for the shares on record.
const sharesPatience = 10 * time.Second

// world is the controllers that rules of scope Workload need.
type world struct {
	*testenv.Env
	*Controller
	policy *policy.Controller
	share  *share.Controller
}

func newWorld(t *testing.T, objects ...client.Object) world {
	t.Helper()
	env := testenv.New(t, objects...)
	state, server := &controllers.State{}, &push.Server{}
	state.Settings.Store(platform.Default())
	state.Additional.Store(&apiserver.Additional{})
	bundle := func() []byte { return []byte("bundle") }
	w := world{
		Env:        env,
		Controller: &Controller{Client: env.Client, Cache: env.Cache, Recorder: env.Recorder, Push: server, State: state},
		policy: &policy.Controller{Resources: &resources.Catalog{}, Client: env.Client, Cache: env.Cache, Pods: env.Cache.Pods, Namespace: "mesh", ClusterCA: bundle, MeshCA: bundle,
			Roots: &roots.Roots{}, Keeper: &locks.Keeper{}, Push: server, State: state, Log: env.Log},
		share: &share.Controller{Push: server, State: state},
	}
	w.Subscribe(w.Controller, w.policy, w.share)
	return w
}

func workloadPod(name string) *corev1.Pod {
	p := testenv.MemberPod(name, v1alpha1.TrustBoth)
	yes := true
	p.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "StatefulSet", Name: "op", UID: "op", Controller: &yes}}
	return p
}

func sharedBreaker() *v1alpha1.CircuitBreaker {
	return &v1alpha1.CircuitBreaker{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "cb", UID: "cb", Generation: 1},
		Spec: v1alpha1.CircuitBreakerSpec{Selector: &metav1.LabelSelector{}, RateLimitings: []v1alpha1.Limiting{{
			Name:          "deletes",
			ResourceRules: []v1alpha1.ResourceRule{{APIGroups: []string{"*"}, Resources: []string{"*"}, Verbs: []string{"delete"}, Namespaces: []string{"*"}}},
			Bucket:        &v1alpha1.Bucket{Burst: 4, Interval: "10s", Limit: 4},
			Scope:         v1alpha1.LimitScopeWorkload,
		}}},
	}
}

// sentShare is the share of the rule in the policy of a pod.
func sentShare(w world, pod string) *meshv1.Share {
	return w.State.Compiled.Load().Policies[types.UID(pod)].Traffic.Breakers[0].Rules[0].Share
}

// recordOf is what is to be recorded.
func recordOf(t *testing.T, w world) []v1alpha1.RuleShares {
	t.Helper()
	record, ok := w.State.Allocator.Record(testenv.Get(t, w.Env, "ns", "cb", &v1alpha1.CircuitBreaker{}))
	require.True(t, ok)
	return record
}

// Shares are recorded, then sent, and the next leader sends what is on record.
func TestShares(t *testing.T) {
	ctx := t.Context()
	w := newWorld(t, workloadPod("op-0"), workloadPod("op-1"), sharedBreaker())
	require.NoError(t, w.policy.Reconcile(ctx))
	require.Zero(t, sentShare(w, "op-0").GetOf())
	w.Triggered("traffic")
	w.Triggered("policies")
	require.NoError(t, w.share.Reconcile(ctx))
	require.True(t, w.Triggered("traffic"), "to be recorded")
	require.False(t, w.Triggered("policies"))

	require.NoError(t, w.Reconcile(ctx))
	cb := testenv.Get(t, w.Env, "ns", "cb", &v1alpha1.CircuitBreaker{})
	require.Equal(t, "2/2", cb.Status.TargetStatus[1].LimitingSnapshots[0].Share)
	require.EqualValues(t, v1alpha1.ReasonRollingOut, meta.FindStatusCondition(cb.Status.Conditions, v1alpha1.ConditionReady).Reason)
	require.NoError(t, w.share.Reconcile(ctx))
	require.True(t, w.Triggered("policies"), "so that they are sent")
	require.NoError(t, w.policy.Reconcile(ctx))
	require.EqualValues(t, 2, sentShare(w, "op-0").GetOf())
	require.EqualValues(t, 1, sentShare(w, "op-1").GetIndex())

	// Nothing is written twice, and what can wait does.
	require.NoError(t, w.Reconcile(ctx))
	require.Equal(t, cb.ResourceVersion, testenv.Get(t, w.Env, "ns", "cb", cb).ResourceVersion)
	require.NoError(t, w.Env.Client.Delete(ctx, workloadPod("op-1")))
	require.NoError(t, w.policy.Reconcile(ctx))
	require.NoError(t, w.Reconcile(ctx))
	require.Equal(t, cb.ResourceVersion, testenv.Get(t, w.Env, "ns", "cb", cb).ResourceVersion, "two seconds have not passed")
	require.NotZero(t, w.next, "it will be looked at again")

	// What is to be recorded cannot.
	require.NoError(t, w.share.Reconcile(ctx))
	require.NoError(t, w.Reconcile(ctx))
	require.Equal(t, "1/1", testenv.Get(t, w.Env, "ns", "cb", &v1alpha1.CircuitBreaker{}).Status.TargetStatus[0].LimitingSnapshots[0].Share)

	// The next leader has not seen the pod that came meanwhile.
	require.NoError(t, w.Env.Client.Create(ctx, workloadPod("op-2")))
	next := newWorld(t)
	next.Env.Client.WithWatch, next.Env.Cache.Reader = w.Env.Client.WithWatch, w.Env.Cache.Reader
	require.NoError(t, next.policy.Reconcile(ctx))
	require.EqualValues(t, 1, sentShare(next, "op-0").GetOf())
	require.Zero(t, sentShare(next, "op-2").GetOf())
	// What it found stays on record, also if that is written before shares are split anew.
	require.NoError(t, next.Reconcile(ctx))
	require.Equal(t, map[string]string{"op-0": "1/1"}, testenv.Get(t, w.Env, "ns", "cb", cb).Status.Shares[0].Pods)
}

// Shares that a status has no room for are given to no pod, and a condition reports it,
// once. When there is room, they are.
func TestTooManyShares(t *testing.T) {
	ctx := t.Context()
	pod := func(i int) *corev1.Pod { return workloadPod(fmt.Sprint(strings.Repeat("op", 40<<10), i)) } // as much as many
	w := newWorld(t, sharedBreaker())
	for i := range 8 {
		require.NoError(t, w.Env.Client.Create(ctx, pod(i)))
	}
	settle := func() *v1alpha1.CircuitBreaker {
		for range 4 {
			require.NoError(t, w.policy.Reconcile(ctx))
			require.NoError(t, w.share.Reconcile(ctx))
			require.NoError(t, w.Reconcile(ctx))
		}
		return testenv.Get(t, w.Env, "ns", "cb", &v1alpha1.CircuitBreaker{})
	}
	cb := settle()
	require.EqualValues(t, v1alpha1.ReasonTooManyShares, meta.FindStatusCondition(cb.Status.Conditions, v1alpha1.ConditionReady).Reason)
	require.Empty(t, cb.Status.Shares)
	require.Zero(t, sentShare(w, pod(0).Name).GetOf())
	w.paces = nil // time passes
	require.Equal(t, cb.ResourceVersion, settle().ResourceVersion, "nothing is new")

	for i := range 4 {
		require.NoError(t, w.Env.Client.Delete(ctx, pod(i)))
	}
	cb = settle()
	require.NotEqual(t, v1alpha1.ReasonTooManyShares, meta.FindStatusCondition(cb.Status.Conditions, v1alpha1.ConditionReady).Reason)
	require.Len(t, cb.Status.Shares[0].Pods, 4)
	require.EqualValues(t, 4, sentShare(w, pod(7).Name).GetOf())
}

// A FaultInjection that expires has no effect before it is written down when, and
// an Event is emitted when it ends.
func TestFaultsThatExpire(t *testing.T) {
	ctx := t.Context()
	d := v1alpha1.Duration("1h")
	w := newWorld(t, workloadPod("op-0"), &v1alpha1.FaultInjection{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "fj", UID: "fj", Generation: 1},
		Spec: v1alpha1.FaultInjectionSpec{Selector: &metav1.LabelSelector{}, Duration: &d, HTTPFaultInjections: []v1alpha1.HTTPFaultInjection{{
			Name: "slow", Delay: &v1alpha1.FaultDelay{FixedDelay: "1s", Percent: "50"},
		}}},
	})
	sent := func() *meshv1.Traffic { return w.State.Compiled.Load().Policies["op-0"].Traffic }
	require.NoError(t, w.policy.Reconcile(ctx))
	require.Nil(t, sent())
	require.NoError(t, w.Reconcile(ctx))
	fj := testenv.Get(t, w.Env, "ns", "fj", &v1alpha1.FaultInjection{})
	require.EqualValues(t, 1, fj.Status.ExpirationGeneration)
	require.WithinDuration(t, time.Now().Add(time.Hour), fj.Status.ExpirationTime.Time, time.Minute)
	require.NoError(t, w.policy.Reconcile(ctx))
	require.Equal(t, fj.Status.ExpirationTime.Unix(), sent().Injections[0].Expires)

	past := metav1.NewTime(time.Now().Add(-time.Minute))
	fj.Status.ExpirationTime = &past
	require.NoError(t, w.Env.Client.Status().Update(ctx, fj))
	require.NoError(t, w.policy.Reconcile(ctx))
	require.Nil(t, sent())
	w.paces = nil // time passes
	require.NoError(t, w.Reconcile(ctx))
	require.Equal(t, "Expired", meta.FindStatusCondition(testenv.Get(t, w.Env, "ns", "fj", fj).Status.Conditions, v1alpha1.ConditionReady).Reason)
	require.Contains(t, <-w.Env.Recorder.Events, "Expired")
}

// A status that another has written meanwhile is written over what that is.
func TestAConflictingWrite(t *testing.T) {
	ctx := t.Context()
	w := newWorld(t, workloadPod("op-0"), sharedBreaker())
	require.NoError(t, w.policy.Reconcile(ctx))
	stale := testenv.Get(t, w.Env, "ns", "cb", &v1alpha1.CircuitBreaker{})
	edited := stale.DeepCopy()
	edited.Annotations = map[string]string{"x": "y"}
	require.NoError(t, w.Env.Client.Update(ctx, edited))
	fresh := w.Env.Cache.Reader
	w.Env.Cache.Reader = lagging{w.Env.Client, stale}
	require.NoError(t, w.Reconcile(ctx))
	require.NotZero(t, w.next, "it will be tried again")
	require.Empty(t, testenv.Get(t, w.Env, "ns", "cb", edited).Status.TargetStatus)
	w.Env.Cache.Reader = fresh
	require.NoError(t, w.Reconcile(ctx))
	cb := testenv.Get(t, w.Env, "ns", "cb", &v1alpha1.CircuitBreaker{})
	require.Len(t, cb.Status.TargetStatus, 1)
	require.Equal(t, "y", cb.Annotations["x"])

	// Our own write is known before the cache has it.
	w.Env.Cache.Reader = lagging{w.Env.Client, edited}
	require.NoError(t, w.Reconcile(ctx))
	require.Equal(t, cb.ResourceVersion, testenv.Get(t, w.Env, "ns", "cb", cb).ResourceVersion)
}

// lagging is a cache that has an object as it was.
type lagging struct {
	client.Reader
	had *v1alpha1.CircuitBreaker
}

func (l lagging) Get(ctx context.Context, k client.ObjectKey, o client.Object, opts ...client.GetOption) error {
	if cb, ok := o.(*v1alpha1.CircuitBreaker); ok {
		l.had.DeepCopyInto(cb)
		return nil
	}
	return l.Reader.Get(ctx, k, o, opts...)
}

// Events are emitted when a breaker opens or closes in a pod, at a limited rate.
func TestEventsOfBreakers(t *testing.T) {
	w := newWorld(t)
	p := &pace{events: rate.NewLimiter(rate.Every(eventGap), eventBurst)}
	as := func(s v1alpha1.BreakerState) *v1alpha1.CircuitBreaker {
		c := sharedBreaker()
		c.Status.TargetStatus = []v1alpha1.TargetStatus{{PodName: "op-0", LimitingSnapshots: []v1alpha1.LimitingSnapshot{{Name: "deletes", State: s}}}}
		return c
	}
	closed, opened, halfOpen := as(v1alpha1.BreakerClosed), as(v1alpha1.BreakerOpened), as(v1alpha1.BreakerHalfOpen)
	w.reportTurns(p, opened, &opened.Status, closed.Status)
	require.Contains(t, <-w.Env.Recorder.Events, "Warning BreakerOpened rule deletes opened in pod op-0")
	w.reportTurns(p, halfOpen, &halfOpen.Status, opened.Status)
	w.reportTurns(p, opened, &opened.Status, halfOpen.Status)
	w.reportTurns(p, opened, &opened.Status, opened.Status)
	require.Empty(t, w.Env.Recorder.Events)
	w.reportTurns(p, closed, &closed.Status, opened.Status)
	require.Contains(t, <-w.Env.Recorder.Events, "Normal BreakerClosed")
	for range 50 {
		w.reportTurns(p, opened, &opened.Status, closed.Status)
		w.reportTurns(p, closed, &closed.Status, opened.Status)
	}
	require.LessOrEqual(t, len(w.Env.Recorder.Events), eventBurst)
}

func TestEventsOfFaults(t *testing.T) {
	w := newWorld(t)
	p := &pace{events: rate.NewLimiter(rate.Every(eventGap), eventBurst)}
	as := func(pods int32) *v1alpha1.FaultInjection {
		return &v1alpha1.FaultInjection{Status: v1alpha1.FaultInjectionStatus{Pods: 3, PodsInForce: pods}}
	}
	w.reportFaults(p, as(2), as(0).Status)
	require.Contains(t, <-w.Env.Recorder.Events, "faults are injected in 2 of 3 pods")
	w.reportFaults(p, as(3), as(2).Status)
	w.reportFaults(p, as(0), as(2).Status)
	require.Empty(t, w.Env.Recorder.Events)
}

// What others wait for is written before what nobody does, and not all counts at once.
func TestUrgentStatusesAreWrittenFirst(t *testing.T) {
	ctx := t.Context()
	var objects []client.Object
	for i := range 2 * countBurst {
		c := sharedBreaker()
		c.Name, c.UID = fmt.Sprintf("a%02d", i), types.UID(fmt.Sprintf("a%d", i))
		c.Spec.RateLimitings[0].Scope = v1alpha1.LimitScopePod
		objects = append(objects, c)
	}
	d := v1alpha1.Duration("1h")
	w := newWorld(t, append(objects, workloadPod("op-0"), sharedBreaker(), &v1alpha1.FaultInjection{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "fj", UID: "fj", Generation: 1},
		Spec: v1alpha1.FaultInjectionSpec{Selector: &metav1.LabelSelector{}, Duration: &d, HTTPFaultInjections: []v1alpha1.HTTPFaultInjection{{
			Name: "slow", Delay: &v1alpha1.FaultDelay{FixedDelay: "1s", Percent: "50"},
		}}},
	})...)
	var written []string
	base := w.Env.Client.WithWatch
	w.Env.Client.WithWatch = interceptor.NewClient(base, interceptor.Funcs{SubResourceUpdate: func(ctx context.Context, c client.Client, sub string, o client.Object, opts ...client.SubResourceUpdateOption) error {
		written = append(written, o.GetName())
		return c.SubResource(sub).Update(ctx, o, opts...)
	}})
	require.NoError(t, w.policy.Reconcile(ctx))
	require.NoError(t, w.share.Reconcile(ctx))
	require.NoError(t, w.Reconcile(ctx))
	require.ElementsMatch(t, []string{"cb", "fj"}, written[:2], "a share to be recorded, and an end")
	require.Len(t, written, 2+2*countBurst)

	w.counts.SetLimit(0) // no time passes
	// A new count in each of them.
	written = nil
	for uid, p := range w.paces {
		if strings.HasPrefix(string(uid), "a") {
			p.at = time.Time{}
			c := p.last.(*v1alpha1.CircuitBreaker)
			c.Status.Refused = 9
			require.NoError(t, base.Status().Update(ctx, c))
		}
	}
	require.NoError(t, w.Reconcile(ctx))
	require.Len(t, written, countBurst)
	require.NotZero(t, w.next, "the others have their turn later")
}

// A new leader does not let everybody wait for shares that it cannot read, and never
// shares out, or takes from the record, what it does not know.
func TestSharesThatCannotBeRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := t.Context()
		cb := sharedBreaker()
		cb.Status.Shares = []v1alpha1.RuleShares{{Rules: []string{"deletes"}, Pods: map[string]string{"op-0": "1/2", "gone": "2/2"}}}
		w := newWorld(t, workloadPod("op-0"), cb)
		away := errors.New("away")
		lists := 0
		w.Env.Client.WithWatch = interceptor.NewClient(w.Env.Client.WithWatch, interceptor.Funcs{List: func(ctx context.Context, c client.WithWatch, l client.ObjectList, opts ...client.ListOption) error {
			if _, ok := l.(*v1alpha1.CircuitBreakerList); ok {
				if lists++; away != nil {
					return away
				}
			}
			return c.List(ctx, l, opts...)
		}})
		require.ErrorIs(t, w.policy.Reconcile(ctx), away)
		require.Nil(t, w.State.Compiled.Load())
		time.Sleep(sharesPatience)
		require.NoError(t, w.policy.Reconcile(ctx))
		require.Zero(t, sentShare(w, "op-0").GetOf())
		require.NoError(t, w.share.Reconcile(ctx))
		require.NoError(t, w.Reconcile(ctx))
		written := testenv.Get(t, w.Env, "ns", "cb", &v1alpha1.CircuitBreaker{}).Status
		require.NotEmpty(t, written.TargetStatus)
		require.Equal(t, cb.Status.Shares, written.Shares)

		away = nil
		require.NoError(t, w.policy.Reconcile(ctx))
		require.Zero(t, w.policy.Spec().Next())
		require.EqualValues(t, 2, sentShare(w, "op-0").GetOf())
		require.NoError(t, w.share.Reconcile(ctx))
		require.Equal(t, map[string]string{"op-0": "1/1"}, recordOf(t, w)[0].Pods)
		asked := lists
		require.NoError(t, w.policy.Reconcile(ctx))
		require.Equal(t, asked, lists, "once")
	})
}

// The shares that pods may still have of a rule that was of scope Workload stay on record
// across leaders, so that no other pod has them when the rule is again. They end with the
// pods.
func TestSharesOutliveTheScope(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := t.Context()
		cb := sharedBreaker()
		cb.Spec.RateLimitings[0].Scope = v1alpha1.LimitScopePod
		cb.Status.Shares = []v1alpha1.RuleShares{{Rules: []string{"deletes"}, Pods: map[string]string{"op-0": "1/2", "op-1": "2/2"}}, {Rules: []string{"before"}, Pods: map[string]string{"gone": "1/1"}}}
		w := newWorld(t, workloadPod("op-0"), workloadPod("op-1"), workloadPod("op-2"), cb)
		base := w.Env.Client.WithWatch
		round := func() []v1alpha1.RuleShares {
			for range 4 {
				require.NoError(t, w.policy.Reconcile(ctx))
				require.NoError(t, w.share.Reconcile(ctx))
				w.paces = nil // time passes
				require.NoError(t, w.Reconcile(ctx))
			}
			return testenv.Get(t, w.Env, "ns", "cb", &v1alpha1.CircuitBreaker{}).Status.Shares
		}
		w.Env.Client.WithWatch = interceptor.NewClient(base, interceptor.Funcs{List: func(ctx context.Context, c client.WithWatch, l client.ObjectList, opts ...client.ListOption) error {
			if _, ok := l.(*v1alpha1.CircuitBreakerList); ok {
				return errors.New("away")
			}
			return c.List(ctx, l, opts...)
		}})
		require.Error(t, w.policy.Reconcile(ctx))
		time.Sleep(sharesPatience)
		require.Equal(t, cb.Status.Shares, round(), "it could not be read")
		w.Env.Client.WithWatch = base
		require.Equal(t, cb.Status.Shares[:1], round(), "no agent has confirmed that it has none")

		scope := func(s v1alpha1.LimitScope) {
			c := testenv.Get(t, w.Env, "ns", "cb", &v1alpha1.CircuitBreaker{})
			c.Generation++
			c.Spec.RateLimitings[0].Scope = s
			require.NoError(t, w.Env.Client.Update(ctx, c))
		}
		scope(v1alpha1.LimitScopeWorkload)
		require.Equal(t, map[string]string{"op-0": "1/2", "op-1": "2/2"}, round()[0].Pods)
		require.EqualValues(t, 3, sentShare(w, "op-0").GetOf())
		require.Zero(t, sentShare(w, "op-2").GetOf())

		scope(v1alpha1.LimitScopePod)
		require.NoError(t, w.Env.Client.Delete(ctx, workloadPod("op-1")))
		require.Equal(t, map[string]string{"op-0": "1/2"}, round()[0].Pods)
		require.NoError(t, w.Env.Client.Delete(ctx, workloadPod("op-0")))
		require.Empty(t, round())
	})
}

// However often policies go on without shares that cannot be read, these are asked for
// again once.
func TestSharesAreAskedForAgainOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var began time.Time
		var asked []time.Duration
		w := newWorld(t, workloadPod("op-0"), sharedBreaker())
		w.Env.Client.WithWatch = interceptor.NewClient(w.Env.Client.WithWatch, interceptor.Funcs{List: func(ctx context.Context, c client.WithWatch, l client.ObjectList, opts ...client.ListOption) error {
			if _, ok := l.(*v1alpha1.CircuitBreakerList); ok {
				asked = append(asked, time.Since(began).Round(time.Second))
				return errors.New("away")
			}
			return c.List(ctx, l, opts...)
		}})
		require.Error(t, w.policy.Reconcile(t.Context()))
		time.Sleep(sharesPatience)

		began, asked = time.Now(), nil
		ctx, cancel := context.WithTimeout(t.Context(), 2*sharesPatience)
		defer cancel()
		c := controllers.New(w.Log, w.policy.Spec())
		time.AfterFunc(sharesPatience/2, c.Trigger)
		time.AfterFunc(sharesPatience*3/4, c.Trigger)
		require.NoError(t, c.Start(ctx))
		require.Equal(t, []time.Duration{0, 5 * time.Second, 8 * time.Second, 18 * time.Second}, asked)
	})
}
