package proxy

import (
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"
	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/scheme"
	coordinationclient "k8s.io/client-go/kubernetes/typed/coordination/v1"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/internal/policytest"
	"github.com/ctrlmesh/ctrlmesh/proxy/lock"
)

const recordJSON = `{"kind":"Lease","apiVersion":"coordination.k8s.io/v1","metadata":{"name":"op"},"spec":{"holderIdentity":"other-1_x","leaseDurationSeconds":15,"acquireTime":"2030-01-01T00:00:00.000000Z","renewTime":"2030-01-01T00:00:00.000000Z","leaseTransitions":1}}`

// namedInRBAC is an apiserver whose RBAC lets an operator create Leases, and update others than
// those of shards.
type namedInRBAC struct {
	leases
	allowed bool
}

func (a *namedInRBAC) serve(w http.ResponseWriter, r *http.Request) {
	if a.allowed || r.Method == http.MethodGet || r.Method == http.MethodPost {
		a.leases.serve(w, r)
		return
	}
	e := apierrors.NewForbidden(coordinationv1.Resource("leases"), "leases---s1", nil)
	e.ErrStatus.Message = `leases.coordination.k8s.io "leases---s1" is forbidden: User "sa" cannot update resource "leases"`
	info, _ := runtime.SerializerInfoForMediaType(scheme.Codecs.SupportedMediaTypes(), r.Header.Get("Accept"))
	w.Header().Set("Content-Type", info.MediaType)
	w.WriteHeader(http.StatusForbidden)
	_ = scheme.Codecs.EncoderForVersion(info.Serializer, metav1.SchemeGroupVersion).Encode(&e.ErrStatus, w)
}

func TestForbiddenLockIsReportedUntilUpdated(t *testing.T) {
	t.Parallel()
	for _, contentType := range []string{runtime.ContentTypeJSON, runtime.ContentTypeProtobuf} {
		t.Run(contentType, func(t *testing.T) {
			api := &namedInRBAC{leases: leases{t: t, objs: map[string]*coordinationv1.Lease{}}}
			api.then = api.serve
			m := newMesh(t, &api.recorder)
			m.policy(policytest.Locked("s1", &meshv1.Limit{Selector: "a=b"}))
			config := m.config("v1")
			config.ContentType, config.AcceptContentTypes = contentType, contentType
			all, err := coordinationclient.NewForConfig(config)
			require.NoError(t, err)
			c := all.Leases("leases")

			lease, err := c.Create(t.Context(), &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: "leases", Namespace: "leases"}}, metav1.CreateOptions{})
			require.NoError(t, err)
			require.Empty(t, m.pod.LockRefusals())
			_, err = c.Update(t.Context(), lease, metav1.UpdateOptions{})
			require.True(t, apierrors.IsForbidden(err), "%v", err)
			require.Equal(t, []lock.Refusal{{
				Namespace: "leases", Name: "leases", Resource: "leases", Verb: "update", Code: http.StatusForbidden, Message: `User "sa" cannot update resource "leases"`,
			}}, m.pod.LockRefusals())
			_, err = c.Get(t.Context(), "leases", metav1.GetOptions{})
			require.NoError(t, err)
			require.Len(t, m.pod.LockRefusals(), 1, "a read proves nothing")

			api.allowed = true
			_, err = c.Update(t.Context(), lease, metav1.UpdateOptions{})
			require.NoError(t, err)
			require.Empty(t, m.pod.LockRefusals())
		})
	}
}

// In standby a member reads the operator's own lock, and the mesh refuses its writes.
func TestRefusalsInStandbyAreNotReported(t *testing.T) {
	t.Parallel()
	api := &recorder{then: func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusForbidden) }}
	m := newMesh(t, api)
	m.policy(policytest.Standby(meshv1.Method_METHOD_AUTO))
	const path = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases/op"
	require.Equal(t, 403, m.do("GET", path, "").StatusCode)
	require.Equal(t, 503, m.do("PUT", path, recordJSON).StatusCode)
	require.Empty(t, m.pod.LockRefusals())
	acting := policytest.Standby(meshv1.Method_METHOD_AUTO)
	acting.Standby = false
	m.policy(acting)
	require.Empty(t, m.pod.LockRefusals())
	require.Equal(t, 403, m.do("GET", path, "").StatusCode)
	require.Len(t, m.pod.LockRefusals(), 1)
}
