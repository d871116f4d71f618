package main

import (
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/ctrlmesh/ctrlmesh/tests/operators/sloppy/check"
)

// faults may be injected between the operator and the apiserver.
type faults struct{ staleLists, dropDeletes, abortCreates bool }

// live creates, changes and deletes a claim, while another stays. It returns the mistakes
// afterwards, when faults have ended and the operator has finished.
func live(t *testing.T, bug Bug, f faults) []string {
	t.Helper()
	ctx := t.Context()
	kube := fake.NewClientset()
	maps := kube.CoreV1().ConfigMaps("ns")
	faulty := true
	kube.PrependReactor("list", "configmaps", func(a clienttesting.Action) (bool, runtime.Object, error) {
		// Only lists that accept cached objects can be stale.
		if o := a.(clienttesting.ListActionImpl).ListOptions; f.staleLists && faulty && o.ResourceVersion == "0" {
			return true, &corev1.ConfigMapList{}, nil
		}
		return false, nil, nil
	})
	kube.PrependReactor("create", "configmaps", func(a clienttesting.Action) (bool, runtime.Object, error) {
		m := a.(clienttesting.CreateAction).GetObject().(*corev1.ConfigMap)
		if f.abortCreates && faulty && m.Labels[check.ChildLabel] != "" {
			return true, nil, apierrors.NewInternalError(injected{})
		}
		return false, nil, nil
	})
	o, err := newOperator(maps, bug)
	require.NoError(t, err)
	resync := func() {
		list, err := maps.List(ctx, metav1.ListOptions{LabelSelector: ClaimLabel})
		require.NoError(t, err)
		_ = o.resync(ctx, list.Items) // the next round retries what failed
	}
	notify := func(kind watch.EventType, claim *corev1.ConfigMap) { _ = o.event(ctx, kind, claim) }
	resync()
	for _, name := range []string{"stays", "goes"} {
		claim, err := maps.Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{ClaimLabel: ""}}}, metav1.CreateOptions{})
		require.NoError(t, err)
		claim.ResourceVersion = "1" // the fake has none
		notify(watch.Added, claim)
		now, err := maps.Get(ctx, name, metav1.GetOptions{})
		require.NoError(t, err)
		now.ResourceVersion = "2"
		notify(watch.Modified, now)
	}
	gone, err := maps.Get(ctx, "goes", metav1.GetOptions{})
	require.NoError(t, err)
	require.NoError(t, maps.Delete(ctx, "goes", metav1.DeleteOptions{}))
	if !f.dropDeletes {
		notify(watch.Deleted, gone)
	}
	faulty = false
	resync()
	resync()
	all, err := maps.List(ctx, metav1.ListOptions{})
	require.NoError(t, err)
	return check.Wrong(all.Items)
}

type injected struct{}

func (injected) Error() string { return "injected by the test" }

// Each bug has no effect without faults, and is exposed by one fault and by no other.
func TestEachBugIsExposedByOneFault(t *testing.T) {
	rules := map[string]faults{
		"none": {}, "stale lists": {staleLists: true}, "dropped events": {dropDeletes: true}, "aborted creates": {abortCreates: true},
	}
	exposes := map[Bug]map[string][]string{
		None:          {},
		StaleRead:     {"stale lists": {"claim stays has 2 children"}},
		LostEvent:     {"dropped events": {"claim goes is deleted and still has a child"}},
		AssumedCreate: {"aborted creates": {"claim stays is recorded as done and has no child"}},
	}
	for bug, by := range exposes {
		for rule, f := range rules {
			require.Equal(t, by[rule], live(t, bug, f), "bug %q, %s", bug, rule)
		}
	}
	_, err := newOperator(nil, "typo")
	require.ErrorContains(t, err, "no such bug")
}
