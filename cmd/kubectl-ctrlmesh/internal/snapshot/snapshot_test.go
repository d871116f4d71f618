package snapshot_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	kruise "github.com/ctrlmesh/ctrlmesh/api/kruise/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/meshtest"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/snapshot"
)

// paged answers lists of pods in three pages of one pod.
type paged struct {
	client.Client
	limits []int64
}

func (p *paged) List(_ context.Context, list client.ObjectList, opts ...client.ListOption) error {
	var o client.ListOptions
	o.ApplyOptions(opts)
	p.limits = append(p.limits, o.Limit)
	pods, ok := list.(*corev1.PodList)
	if !ok {
		return errors.New("pods only")
	}
	n := len(p.limits)
	if want := ""; n > 1 {
		want = fmt.Sprint("after ", n-1)
		if o.Continue != want {
			return fmt.Errorf("continue is %q, not %q", o.Continue, want)
		}
	}
	pods.Items = []corev1.Pod{*meshtest.Pod("ns", fmt.Sprint("p-", n), "node")}
	if n < 3 {
		pods.Continue = fmt.Sprint("after ", n)
	}
	return nil
}

func TestListsAreReadPageByPage(t *testing.T) {
	r := meshtest.Healthy(t).Reader(t)
	pages := &paged{Client: r.Client}
	r.Client = pages
	s, err := r.Read(t.Context(), snapshot.Members("ns"))
	require.NoError(t, err)
	require.NoError(t, s.Err())
	require.Len(t, s.Pods, 3)
	require.Equal(t, []int64{500, 500, 500}, pages.limits)
}

func TestLeaseEndsAfterItsDuration(t *testing.T) {
	lease := meshtest.Lease("ns", "l", "a_1")
	renewed := lease.Spec.RenewTime.Time
	for name, c := range map[string]struct {
		change func()
		holder string
		since  time.Time
	}{
		"renewed":       {func() {}, "a_1", time.Time{}},
		"expired":       {func() { lease.Spec.LeaseDurationSeconds = new(int32(1)) }, "", renewed.Add(time.Second)},
		"released":      {func() { lease.Spec.HolderIdentity = new("") }, "", renewed},
		"never held":    {func() { lease.Spec.HolderIdentity, lease.Spec.RenewTime = nil, nil }, "", time.Time{}},
		"without times": {func() { lease.Spec.RenewTime, lease.Spec.LeaseDurationSeconds = nil, nil }, "a_1", time.Time{}},
	} {
		t.Run(name, func(t *testing.T) {
			lease = meshtest.Lease("ns", "l", "a_1")
			c.change()
			holder, since := snapshot.Holder(lease, meshtest.Now)
			require.Equal(t, c.holder, holder)
			require.True(t, c.since.Equal(since), "%s", since)
		})
	}
	holder, _ := snapshot.Holder(nil, meshtest.Now)
	require.Empty(t, holder)
}

func TestConfigurationsOfAllKindsAreRead(t *testing.T) {
	c := meshtest.Healthy(t)
	c.Add(&kruise.VirtualApp{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "app"}, Spec: kruise.VirtualAppSpec{
		Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"a": "b"}},
	}})
	s, err := c.Reader(t).Read(t.Context(), snapshot.Configs(""))
	require.NoError(t, err)
	require.NoError(t, s.Err())
	require.NotNil(t, s.Config("ns", "app").Spec.Root)
	require.NotNil(t, s.Config(meshtest.Operator, "by-hand").Spec.Selector)
	require.Nil(t, s.Config("ns", "by-hand"))
}

func TestTrafficPoliciesOfANamespaceAreRead(t *testing.T) {
	text, err := os.ReadFile("../../../../manager/dialect/testdata/trafficpolicy.in.yaml")
	require.NoError(t, err)
	first, second, _ := strings.Cut(string(text), "\n---\n")
	app, policy := &kruise.VirtualApp{}, &kruise.TrafficPolicy{}
	require.NoError(t, yaml.Unmarshal([]byte(first), app))
	require.NoError(t, yaml.Unmarshal([]byte(second), policy))
	c := meshtest.Healthy(t)
	c.Add(app, policy)
	r := c.Reader(t)
	for namespace, want := range map[string]bool{policy.Namespace: true, "other": false} {
		s, err := r.Read(t.Context(), snapshot.TrafficPolicies(namespace))
		require.NoError(t, err)
		require.NoError(t, s.Err())
		require.Equal(t, want, len(s.Subjects.Translated) > 0, namespace)
	}
}

func TestKindsThatAreNotServedAreAbsent(t *testing.T) {
	for name, err := range map[string]error{
		"the mapper knows none": &meta.NoKindMatchError{GroupKind: schema.GroupKind{Kind: "VirtualApp"}},
		"not found":             apierrors.NewNotFound(schema.GroupResource{}, ""),
		"forbidden":             apierrors.NewForbidden(schema.GroupResource{}, "", errors.New("no")),
	} {
		t.Run(name, func(t *testing.T) {
			c := meshtest.Healthy(t)
			c.Forbidden = func(list client.ObjectList) error {
				if _, native := list.(*v1alpha1.ShardingConfigList); native {
					return nil
				}
				return err
			}
			s, failed := c.Reader(t).Read(t.Context(), snapshot.Configs(""))
			require.NoError(t, failed)
			require.NoError(t, s.Err())
			require.NotNil(t, s.Config(meshtest.Operator, meshtest.Operator))
		})
	}
}

func TestUnreadPartsAreNamed(t *testing.T) {
	c := meshtest.Healthy(t)
	c.Forbidden = func(client.ObjectList) error {
		return apierrors.NewForbidden(schema.GroupResource{Resource: "x"}, "", errors.New("no"))
	}
	s, err := c.Reader(t).Read(t.Context(), snapshot.Members(""), snapshot.Keys)
	require.NoError(t, err)
	require.ErrorContains(t, s.Err(), "reading labelled pods: ")
	require.False(t, s.Has(snapshot.Members("")))
	require.True(t, s.Has(snapshot.Keys))
}
