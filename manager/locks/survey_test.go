package locks

import (
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/push"
)

// A pod that reads a lock shows that it is the operator's while a pod of its own workload
// holds it.
func TestDiscoverLockFromReads(t *testing.T) {
	pod := func(kind, owner, hash string) *corev1.Pod {
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
			Namespace: "ns", Name: "reader", OwnerReferences: []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: kind, Name: owner, Controller: new(true)}},
		}}
		if hash != "" {
			p.Labels = map[string]string{"pod-template-hash": hash}
		}
		return p
	}
	deployed := pod("ReplicaSet", "op-6d4cf56db6", "6d4cf56db6")
	for name, c := range map[string]struct {
		pod        *corev1.Pod
		holder     string
		discovered bool
	}{
		"Deployment":                           {deployed, "op-6d4cf56db6-x2b9z_4711", true},
		"Deployment, earlier template":         {deployed, "op-7c9f-bbbbb_4711", true},
		"Deployment, identity without suffix":  {deployed, "op-7c9f-bbbbb", true},
		"Deployment of a longer name":          {deployed, "op-webhook-6d4cf56db6-x2b9z_4711", false},
		"Deployment of a shorter name":         {pod("ReplicaSet", "op-webhook-7c9f", "7c9f"), "op-7c9f-bbbbb_4711", false},
		"StatefulSet":                          {pod("StatefulSet", "op", ""), "op-12_4711", true},
		"StatefulSet of a longer name":         {pod("StatefulSet", "op", ""), "op-db-0_4711", false},
		"ReplicaSet":                           {pod("ReplicaSet", "op", ""), "op-bbbbb_4711", true},
		"no controller":                        {&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "op"}}, "op-0_4711", false},
		"holder that is not known":             {deployed, "", false},
		"holder that is not named after a pod": {deployed, "op", false},
	} {
		t.Run(name, func(t *testing.T) {
			config := &v1alpha1.ShardingConfig{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "op"}}
			seen := Sighting{Pod: c.pod, ObservedLock: push.ObservedLock{Namespace: "kube-system", Name: "lock", Resource: Leases, Holder: c.holder}}
			known, obstacle := Survey(config, nil, []Sighting{seen}, nil, &Keeper{})
			require.Nil(t, obstacle)
			require.Equal(t, c.discovered, len(known) == 1)
		})
	}
}

// A mutex that several operators share has the record of an election.
func TestExcludedLocksAreNotDiscovered(t *testing.T) {
	config := &v1alpha1.ShardingConfig{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "op"}, Spec: v1alpha1.ShardingConfigSpec{Controller: &v1alpha1.ControllerConfig{
		ExcludedLocks: []v1alpha1.ExcludedLock{{Namespace: "shared", Name: "mutex"}, {Namespace: "shared", Name: "node-*"}},
	}}}
	var seen []Sighting
	for _, name := range []string{"mutex", "node-1", "mutex-1", "elector"} {
		seen = append(seen, Sighting{Pod: &corev1.Pod{}, ObservedLock: push.ObservedLock{Namespace: "shared", Name: name, Resource: Leases, Written: true}})
	}
	before := []v1alpha1.LockStatus{{Namespace: "shared", Name: "mutex", Discovered: true}}
	known, obstacle := Survey(config, before, seen, nil, &Keeper{})
	require.Nil(t, obstacle)
	require.Len(t, known, 2, "neither a new one nor one that was discovered before it was excluded")
	require.Equal(t, "mutex-1 elector", known[0].Name+" "+known[1].Name)

	config.Spec.Controller.Locks = []v1alpha1.LockReference{{Namespace: "shared", Name: "mutex"}}
	known, _ = Survey(config, nil, seen[:1], nil, &Keeper{})
	require.Len(t, known, 1, "a lock that is named")
	require.Equal(t, []string{Leases}, known[0].Resources)
}
