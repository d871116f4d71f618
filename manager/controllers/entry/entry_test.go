package entry

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/time/rate"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/controllers"
	"github.com/ctrlmesh/ctrlmesh/manager/inject"
	"github.com/ctrlmesh/ctrlmesh/manager/internal/testenv"
	"github.com/ctrlmesh/ctrlmesh/manager/label"
	"github.com/ctrlmesh/ctrlmesh/manager/origin"
)

func app(namespace, name string, selector *metav1.LabelSelector) *v1alpha1.ShardingConfig {
	c := &v1alpha1.ShardingConfig{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, UID: types.UID(namespace + name)},
		Spec:       v1alpha1.ShardingConfigSpec{Root: &v1alpha1.RootConfig{TargetSelector: selector}},
	}
	c.SetGroupVersionKind(origin.VirtualApp)
	return c
}

var component = &metav1.LabelSelector{MatchLabels: map[string]string{"component": "op"}}

func TestEntries(t *testing.T) {
	state := &controllers.State{}
	env := testenv.New(t, &admissionv1.MutatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: inject.EntriesConfiguration}})
	r := &Controller{Client: env.Client, Service: types.NamespacedName{Namespace: "mesh", Name: "webhook"}, CA: func() []byte { return []byte("ca") }, State: state, Now: time.Now}
	written := func() []admissionv1.MutatingWebhook {
		return testenv.Get(t, env, "", inject.EntriesConfiguration, &admissionv1.MutatingWebhookConfiguration{}).Webhooks
	}
	one := app("ns", "one", component)
	native := app("ns", "native", component)
	native.SetGroupVersionKind(origin.Native)
	long := app("ns", strings.Repeat("a", 250), component)
	listed := &controllers.Listed{Configs: []*v1alpha1.ShardingConfig{
		one, native, app("ns", "none", nil), app("ns", "all", &metav1.LabelSelector{}), app("mesh", "own", component), app("kube-system", "system", component), long,
		app("ns", "invalid", &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: "a", Operator: "Like"}}}),
	}}
	state.Listed.Store(listed)
	require.Zero(t, state.Entry(one).Since)
	require.NoError(t, r.Reconcile(t.Context()))
	require.Len(t, written(), 1, "only one of them names pods that are not those of the mesh or the system")
	w := written()[0]
	require.Equal(t, "one.ns.virtualapps.ctrlmesh.kruise.io", w.Name)
	require.Equal(t, component, w.ObjectSelector)
	require.Equal(t, map[string]string{"kubernetes.io/metadata.name": "ns"}, w.NamespaceSelector.MatchLabels)
	require.Equal(t, admissionv1.Fail, *w.FailurePolicy)
	since := state.Entry(one).Since
	require.NotZero(t, since)

	time.Sleep(time.Millisecond)
	require.NoError(t, r.Reconcile(t.Context()))
	require.Equal(t, since, state.Entry(one).Since, "the entry stays")

	edited := testenv.Get(t, env, "", inject.EntriesConfiguration, &admissionv1.MutatingWebhookConfiguration{})
	edited.Webhooks = nil
	require.NoError(t, env.Client.Update(t.Context(), edited))
	require.NoError(t, r.Reconcile(t.Context()))
	require.Len(t, written(), 1)
	require.True(t, state.Entry(one).Since.After(since), "pods may have been created meanwhile")

	deleted := app("ns", "one", component)
	deleted.DeletionTimestamp = new(metav1.Now())
	state.Listed.Store(&controllers.Listed{Configs: []*v1alpha1.ShardingConfig{deleted}})
	require.NoError(t, r.Reconcile(t.Context()))
	require.Len(t, written(), 1, "its shards still act")
	state.Listed.Store(&controllers.Listed{})
	require.NoError(t, r.Reconcile(t.Context()))
	require.Empty(t, written())
	require.Zero(t, state.Entry(one).Since)
}

// One tenant must not keep the entries of the others from being stored.
func TestEntriesFitOneObject(t *testing.T) {
	service := types.NamespacedName{Namespace: "mesh", Name: "webhook"}
	long := &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: "a", Operator: metav1.LabelSelectorOpIn}}}
	for i := range 30 {
		long.MatchExpressions[0].Values = append(long.MatchExpressions[0].Values, fmt.Sprint(strings.Repeat("x", 60), i))
	}
	var configs []*v1alpha1.ShardingConfig
	for i := range 1000 {
		c := app("ns", fmt.Sprint("a", i), long)
		c.CreationTimestamp = metav1.Unix(int64(2000-i), 0)
		configs = append(configs, c)
	}
	entries, full := inject.Entries(configs, service, []byte("ca"))
	require.NotEmpty(t, entries)
	require.Len(t, full, len(configs)-len(entries))
	stored := &admissionv1.MutatingWebhookConfiguration{Webhooks: entries}
	require.Less(t, stored.Size(), 1200<<10)
	require.Contains(t, full, configs[0], "the youngest")
	require.NotContains(t, full, configs[999], "the oldest")
}

func TestMissingConfigurationIsReported(t *testing.T) {
	state := &controllers.State{}
	r := &Controller{Client: testenv.New(t).Client, CA: func() []byte { return nil }, State: state, Now: time.Now}
	state.Listed.Store(&controllers.Listed{})
	require.NoError(t, r.Reconcile(t.Context()))
	one := app("ns", "one", component)
	state.Listed.Store(&controllers.Listed{Configs: []*v1alpha1.ShardingConfig{one}})
	require.ErrorContains(t, r.Reconcile(t.Context()), "apply the manifests of the mesh again")
	require.Zero(t, state.Entry(one).Since)
}

func TestPolicyReplacesEntries(t *testing.T) {
	now := time.Unix(1000, 0)
	env := testenv.New(t, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "ns"}}, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "other"}},
		&admissionv1.MutatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: inject.EntriesConfiguration}})
	r := &Controller{
		Client: env.Client, Service: types.NamespacedName{Namespace: "mesh", Name: "webhook"}, CA: func() []byte { return nil }, State: &controllers.State{},
		Namespaces: &label.Namespaces{Client: env.Client, Cache: env.Client, Limiter: rate.NewLimiter(rate.Inf, 1)}, Now: func() time.Time { return now },
	}
	one, two := app("ns", "one", component), app("other", "two", component)
	reconcile := func(apps ...*v1alpha1.ShardingConfig) (entries int, labelled []string) {
		r.State.Listed.Store(&controllers.Listed{Configs: apps})
		require.NoError(t, r.Reconcile(t.Context()))
		for _, name := range []string{"ns", "other"} {
			if testenv.Get(t, env, "", name, &corev1.Namespace{}).Labels[v1alpha1.VirtualAppsLabel] == "true" {
				labelled = append(labelled, name)
			}
		}
		return len(testenv.Get(t, env, "", inject.EntriesConfiguration, &admissionv1.MutatingWebhookConfiguration{}).Webhooks), labelled
	}
	entries, labelled := reconcile(one)
	require.Equal(t, 1, entries)
	require.Empty(t, labelled)
	since := r.State.Entry(one)

	meta := metav1.ObjectMeta{Name: inject.EntriesConfiguration, CreationTimestamp: metav1.NewTime(now)}
	require.NoError(t, env.Client.Create(t.Context(), &admissionv1.MutatingAdmissionPolicy{ObjectMeta: meta}))
	require.NoError(t, env.Client.Create(t.Context(), &admissionv1.MutatingAdmissionPolicyBinding{ObjectMeta: meta}))
	now = now.Add(time.Second)
	entries, labelled = reconcile(one, two)
	require.Equal(t, 1, entries, "it stays, and gets no successor")
	require.Equal(t, []string{"ns", "other"}, labelled)
	require.Equal(t, since, r.State.Entry(one), "pods were admitted throughout")
	require.Equal(t, now, r.State.Entry(two).Since)

	now = now.Add(controllers.PolicyDelay)
	entries, _ = reconcile(one, two)
	require.Zero(t, entries)
	require.Equal(t, since, r.State.Entry(one))

	edited := testenv.Get(t, env, "", "ns", &corev1.Namespace{})
	edited.Labels = nil
	require.NoError(t, env.Client.Update(t.Context(), edited))
	_, labelled = reconcile(one)
	require.Equal(t, []string{"ns"}, labelled, "the other has none any more")
	require.Equal(t, now, r.State.Entry(one).Since, "pods may have been created meanwhile")
	require.Zero(t, r.State.Entry(two))
}
