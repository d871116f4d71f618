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
