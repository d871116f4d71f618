package command

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/meshtest"
)

func ready(status metav1.ConditionStatus, reason v1alpha1.Reason, message string) []metav1.Condition {
	return []metav1.Condition{{Type: v1alpha1.ConditionReady, Status: status, Reason: string(reason), Message: message}}
}

// ago returns a time in the past of the cluster.
func ago(d time.Duration) *metav1.Time { return new(metav1.NewTime(meshtest.Now.Add(-d))) }

// withBreakers adds a CircuitBreaker with open breakers, and one without.
func withBreakers(_ *testing.T, c *meshtest.Cluster) {
	rule := func(name string, trigger v1alpha1.TriggerPolicy, policy *v1alpha1.RecoverPolicy) v1alpha1.Limiting {
		return v1alpha1.Limiting{Name: name, TriggerPolicy: trigger, RecoverPolicy: policy}
	}
	snapshotOf := func(name string, state v1alpha1.BreakerState, since *metav1.Time) v1alpha1.LimitingSnapshot {
		return v1alpha1.LimitingSnapshot{Name: name, State: state, LastTransitionTime: since, Refused: 7}
	}
	c.Add(&v1alpha1.CircuitBreaker{
		ObjectMeta: metav1.ObjectMeta{Namespace: meshtest.Operator, Name: "deletes"},
		Spec: v1alpha1.CircuitBreakerSpec{RateLimitings: []v1alpha1.Limiting{
			rule("default", "", nil), rule("sleeps", v1alpha1.TriggerNormal, &v1alpha1.RecoverPolicy{Type: v1alpha1.RecoverSleepingWindow, SleepingWindowSize: new(v1alpha1.Duration("1m"))}),
			rule("by-hand", "", &v1alpha1.RecoverPolicy{Type: v1alpha1.RecoverManual}), rule("closed", "", nil),
		}},
		Status: v1alpha1.CircuitBreakerStatus{Conditions: ready(metav1.ConditionTrue, v1alpha1.ReasonInForce, ""), Pods: 3, PodsInForce: 3, Opened: 3, Refused: 28, TargetStatus: []v1alpha1.TargetStatus{
			{PodName: "od-1", LimitingSnapshots: []v1alpha1.LimitingSnapshot{
				snapshotOf("default", v1alpha1.BreakerOpened, ago(time.Minute)), snapshotOf("sleeps", v1alpha1.BreakerOpened, ago(20*time.Second)), snapshotOf("closed", v1alpha1.BreakerClosed, ago(time.Minute)),
			}},
			{PodName: "od-0", LimitingSnapshots: []v1alpha1.LimitingSnapshot{
				snapshotOf("default", v1alpha1.BreakerHalfOpen, ago(time.Second)), snapshotOf("by-hand", v1alpha1.BreakerOpened, ago(time.Hour)), snapshotOf("removed", v1alpha1.BreakerOpened, nil),
			}},
		}},
	}, &v1alpha1.CircuitBreaker{
		ObjectMeta: metav1.ObjectMeta{Namespace: "other", Name: "quiet"},
		Status:     v1alpha1.CircuitBreakerStatus{Conditions: ready(metav1.ConditionTrue, v1alpha1.ReasonInForce, ""), Pods: 1, PodsInForce: 1},
	})
}

// withFaults adds a FaultInjection in force, and one in another namespace that has expired.
func withFaults(_ *testing.T, c *meshtest.Cluster) {
	c.Add(&v1alpha1.FaultInjection{
		ObjectMeta: metav1.ObjectMeta{Namespace: meshtest.Operator, Name: "conflicts", Generation: 2},
		Spec: v1alpha1.FaultInjectionSpec{HTTPFaultInjections: []v1alpha1.HTTPFaultInjection{
			{Name: "writes", Abort: &v1alpha1.FaultAbort{HTTPStatus: 409, Percent: "5"}, Delay: &v1alpha1.FaultDelay{}},
			{Name: "watches", Watch: &v1alpha1.FaultWatch{}},
		}},
		Status: v1alpha1.FaultInjectionStatus{
			Conditions: ready(metav1.ConditionTrue, v1alpha1.ReasonInForce, "in force"), Pods: 2, PodsInForce: 2, Injected: 5, ExpirationTime: ago(-time.Hour), ExpirationGeneration: 2,
			TargetStatus: []v1alpha1.TargetStatus{
				{PodName: "od-0", FaultSnapshots: []v1alpha1.FaultSnapshot{{Name: "writes", Matched: 60, Injected: 5}, {Name: "watches", Matched: 1}}},
				{PodName: "od-1", FaultSnapshots: []v1alpha1.FaultSnapshot{{Name: "writes", Matched: 40}}},
			},
		},
	}, &v1alpha1.FaultInjection{
		ObjectMeta: metav1.ObjectMeta{Namespace: "other", Name: "past", Generation: 2},
		Status:     v1alpha1.FaultInjectionStatus{Conditions: ready(metav1.ConditionFalse, v1alpha1.ReasonExpired, "its duration has passed"), Pods: 1, ExpirationTime: ago(time.Hour), ExpirationGeneration: 1},
	})
}

func TestTrafficCommands(t *testing.T) {
	requireScenarios(t, []scenario{
		{name: "breaker-open", plant: withBreakers, args: "breaker", code: Found},
		{name: "breaker-all", plant: withBreakers, args: "breaker -A", code: Found, tables: true},
		{name: "breaker-quiet", plant: withBreakers, args: "breaker quiet -n other", tables: true},
		{name: "breaker-none", plant: nothing, args: "breakers"},
		{name: "breaker-unknown", plant: withBreakers, args: "breaker quiet", code: Unknown, tables: true},
		{name: "breaker-forbidden", plant: forbids(&v1alpha1.CircuitBreakerList{}, "circuitbreakers"), args: "breaker", code: Unknown, tables: true},
		{name: "faults", plant: withFaults, args: "faults", code: Found},
		{name: "faults-all", plant: withFaults, args: "faults -A", code: Found, tables: true},
		{name: "faults-past", plant: withFaults, args: "faults -n other", tables: true},
		{name: "faults-none", plant: nothing, args: "faults"},
		{name: "faults-unreachable", plant: unreachable, args: "faults", code: Unknown, tables: true},
	})
}

// reacting lets the manager react on a CircuitBreaker and a FaultInjection, some polls after their change.
func reacting(t *testing.T, c *meshtest.Cluster) {
	c.Refuse = func(string, client.Object) error { return nil }
	polls := 0
	c.Advance = func(of client.Client) {
		if polls++; polls < 5 {
			return
		}
		b := &v1alpha1.CircuitBreaker{}
		require.NoError(t, of.Get(t.Context(), client.ObjectKey{Namespace: meshtest.Operator, Name: "deletes"}, b))
		if b.Annotations[v1alpha1.RecoverAnnotation] != "" {
			b.Status.TargetStatus, b.Status.Opened = nil, 0
		}
		if _, disabled := b.Labels[v1alpha1.DisableBreakerLabel]; disabled {
			b.Status.Conditions = ready(metav1.ConditionFalse, v1alpha1.ReasonDisabled, "it is disabled")
		} else {
			b.Status.Conditions = ready(metav1.ConditionTrue, v1alpha1.ReasonInForce, "in force")
		}
		require.NoError(t, of.Update(t.Context(), b))
		f := &v1alpha1.FaultInjection{}
		require.NoError(t, of.Get(t.Context(), client.ObjectKey{Namespace: meshtest.Operator, Name: "conflicts"}, f))
		if f.Labels[v1alpha1.DisableFaultsLabel] != "" {
			message := "it is disabled"
			if polls < 9 {
				message += "; earlier rules may still be in force: pod od-1: no agent is connected"
			}
			f.Status.Conditions, f.Status.PodsInForce = ready(metav1.ConditionFalse, v1alpha1.ReasonDisabled, message), 0
		}
		require.NoError(t, of.Update(t.Context(), f))
	}
}

func TestTrafficIsChanged(t *testing.T) {
	for _, format := range []string{"table", "json"} {
		for name, c := range map[string]struct {
			args    string
			written []string
		}{
			"breaker-close":   {"breaker close deletes", []string{"patch *v1alpha1.CircuitBreaker deletes"}},
			"breaker-disable": {"breaker disable deletes", []string{"patch *v1alpha1.CircuitBreaker deletes"}},
			"breaker-enable":  {"breaker enable deletes", []string{"patch *v1alpha1.CircuitBreaker deletes"}},
			"faults-stop":     {"faults stop conflicts", []string{"patch *v1alpha1.FaultInjection conflicts"}},
			"faults-stop-all": {"faults stop --all -A", []string{"patch *v1alpha1.FaultInjection conflicts"}},
		} {
			t.Run(name+"/"+format, func(t *testing.T) {
				cluster := meshtest.Healthy(t)
				withBreakers(t, cluster)
				withFaults(t, cluster)
				reacting(t, cluster)
				r := run(t, cluster, "", append(strings.Fields(c.args), "-o", format)...)
				assert.Equal(t, Healthy, r.code, "%s", r)
				assert.Equal(t, c.written, cluster.Written)
				requireGolden(t, name+"."+format, r)
			})
		}
	}
}

func TestTrafficChangesThatFail(t *testing.T) {
	forced := func(t *testing.T, c *meshtest.Cluster) {
		withBreakers(t, c)
		b := meshtest.Find[*v1alpha1.CircuitBreaker](t, c, meshtest.Operator, "deletes")
		b.Spec.RateLimitings[0].TriggerPolicy = v1alpha1.TriggerForceOpened
		b.Status.TargetStatus = b.Status.TargetStatus[:1]
		b.Status.TargetStatus[0].LimitingSnapshots = b.Status.TargetStatus[0].LimitingSnapshots[:1]
	}
	unlisted := func(t *testing.T, c *meshtest.Cluster) {
		withBreakers(t, c)
		meshtest.Find[*v1alpha1.CircuitBreaker](t, c, meshtest.Operator, "deletes").Status.TargetStatus = nil
	}
	specDisabled := func(t *testing.T, c *meshtest.Cluster) {
		withBreakers(t, c)
		meshtest.Find[*v1alpha1.CircuitBreaker](t, c, meshtest.Operator, "deletes").Spec.Disabled = true
	}
	for name, c := range map[string]struct {
		plant func(*testing.T, *meshtest.Cluster)
		args  string
		code  int
		want  string
	}{
		"no breaker":        {nothing, "breaker close deletes", Unknown, "there is no CircuitBreaker deletes"},
		"no name":           {withBreakers, "breaker close", Unknown, "accepts 1 arg(s), received 0: usage: kubectl ctrlmesh breaker close NAME"},
		"open breakers":     {withBreakers, "breaker close deletes --timeout=20ms", Found, "! the breaker of rule default is open in pod od-1"},
		"unlisted breakers": {unlisted, "breaker close deletes --timeout=20ms", Found, "! breakers are open in 3 pods that the status does not list"},
		"forced breaker":    {forced, "breaker close deletes", Found, "triggerPolicy ForceOpened"},
		"still in force":    {withBreakers, "breaker disable deletes --timeout=20ms", Found, "timed out after 20ms"},
		"spec.disabled":     {specDisabled, "breaker enable deletes", Unknown, "set it to false"},
		"no faults":         {nothing, "faults stop conflicts", Unknown, "there is no FaultInjection conflicts"},
		"no choice":         {withFaults, "faults stop", Unknown, "name one FaultInjection, or all"},
		"both choices":      {withFaults, "faults stop conflicts --all", Unknown, "name one FaultInjection, or all"},
		"faults in force":   {withFaults, "faults stop --all --timeout=20ms", Found, "! FaultInjection operator-demo/conflicts: InForce: in force\n  kubectl ctrlmesh faults -A\n"},
	} {
		t.Run(name, func(t *testing.T) {
			cluster := meshtest.Healthy(t)
			c.plant(t, cluster)
			cluster.Refuse = func(string, client.Object) error { return nil }
			r := run(t, cluster, "", strings.Fields(c.args)...)
			require.Equal(t, c.code, r.code, "%s", r)
			require.Contains(t, r.out+r.err, c.want)
		})
	}
}

func TestTrafficChangesThatTheApiserverRefuses(t *testing.T) {
	for _, args := range []string{"breaker close deletes", "breaker disable deletes", "breaker enable deletes", "faults stop --all"} {
		c := meshtest.Healthy(t)
		withBreakers(t, c)
		withFaults(t, c)
		refuses("patch", errors.New("forbidden"))(t, c)
		r := run(t, c, "", strings.Fields(args)...)
		require.Equal(t, Unknown, r.code, "%s", r)
		require.Contains(t, r.err, "you need permission to get and patch it", args)
	}
}

func TestFaultsStopWithoutFaults(t *testing.T) {
	r := run(t, meshtest.Healthy(t), "", "faults", "stop", "--all")
	require.Equal(t, Healthy, r.code, "%s", r)
	require.Contains(t, r.out, "no fault is in force in a pod")
}
