package lock_test

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"sigs.k8s.io/yaml"

	"github.com/ctrlmesh/ctrlmesh/proxy/lock"
)

// elected is a Lease as client-go writes it.
func elected(holder string) *coordinationv1.Lease {
	now := metav1.NewTime(time.Unix(1, 0))
	return &coordinationv1.Lease{
		TypeMeta:   metav1.TypeMeta{APIVersion: "coordination.k8s.io/v1", Kind: "Lease"},
		ObjectMeta: metav1.ObjectMeta{Name: "op", Namespace: "ns"},
		Spec: resourcelock.LeaderElectionRecordToLeaseSpec(&resourcelock.LeaderElectionRecord{
			HolderIdentity: holder, LeaseDurationSeconds: 15, AcquireTime: now, RenewTime: now,
		}),
	}
}

func configMap(annotation string) *corev1.ConfigMap {
	cm := &corev1.ConfigMap{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "ConfigMap"}, ObjectMeta: metav1.ObjectMeta{Name: "op", Namespace: "ns"}}
	if annotation != "" {
		cm.Annotations = map[string]string{"other": "x", resourcelock.LeaderElectionRecordAnnotationKey: annotation}
	}
	return cm
}

func TestFindRecordInObjects(t *testing.T) {
	heartbeat := elected("node-1") // as the kubelet and the apiservers write theirs
	heartbeat.Spec.AcquireTime, heartbeat.Spec.LeaseTransitions = nil, nil
	for name, c := range map[string]struct {
		resource string
		object   runtime.Object
		holder   string
	}{
		"lease":          {"leases", elected("pod_1"), "pod_1"},
		"released lease": {"leases", elected(""), ""},
		"heartbeat":      {"leases", heartbeat, ""},
		"configmap":      {"configmaps", configMap(`{"holderIdentity":"pod_1","leaseDurationSeconds":15}`), "pod_1"},
		"configmap of the Python client": {"configmaps",
			configMap(`{"holderIdentity": "pod_1", "leaseDurationSeconds": "17", "acquireTime": "2026-01-01 00:00:00.000001", "renewTime": "2026-01-01 00:00:00.000001"}`), "pod_1"},
		"released configmap":        {"configmaps", configMap(`{"holderIdentity":""}`), ""},
		"configmap without record":  {"configmaps", configMap(""), ""},
		"configmap with a nonsense": {"configmaps", configMap("{"), ""},
		"endpoints": {"endpoints", &corev1.Endpoints{ //nolint:staticcheck // old locks are made of them
			TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Endpoints"},
			ObjectMeta: metav1.ObjectMeta{Name: "op", Annotations: configMap(`{"holderIdentity":"pod_1"}`).Annotations},
		}, "pod_1"},
	} {
		t.Run(name, func(t *testing.T) {
			asJSON, err := json.Marshal(c.object)
			require.NoError(t, err)
			asYAML, err := yaml.Marshal(c.object)
			require.NoError(t, err)
			for contentType, body := range map[string][]byte{
				jsonType: asJSON, protoType: encode(t, c.object), "application/apply-patch+yaml": asYAML, "": asJSON,
			} {
				r, ok, err := lock.FindRecord(c.resource, contentType, body)
				require.NoError(t, err)
				require.Equal(t, c.holder != "", ok, contentType)
				if ok {
					require.Equal(t, lock.Record{Name: "op", Holder: c.holder}, r, contentType)
				}
			}
		})
	}
}

func TestFindRecordInPatches(t *testing.T) {
	const merge, patch = "application/merge-patch+json", "application/json-patch+json"
	for _, c := range []struct {
		resource, contentType, body string
		found                       bool
	}{
		{"leases", merge, `{"spec":{"holderIdentity":"a","acquireTime":"2030-01-01T00:00:00.000000Z"}}`, true},
		{"leases", merge, `{"spec":{"renewTime":"2030-01-01T00:00:00.000000Z"}}`, false},
		{"leases", merge, `{"spec":{"holderIdentity":null,"acquireTime":null}}`, false},
		{"leases", patch, `[{"op":"replace","path":"/spec/holderIdentity","value":"a"},{"op":"add","path":"/spec/acquireTime","value":"2030-01-01T00:00:00.000000Z"}]`, true},
		{"leases", patch, `[{"op":"replace","path":"/spec","value":{"holderIdentity":"a","acquireTime":"x"}}]`, true},
		{"leases", patch, `[{"op":"add","path":"","value":{"spec":{"holderIdentity":"a","acquireTime":"x"}}}]`, true},
		{"leases", patch, `[{"op":"test","path":"/spec/holderIdentity","value":"a"},{"op":"replace","path":"/spec/acquireTime","value":"x"}]`, false},
		{"leases", patch, `[{"op":"add","path":"","value":null},{"op":"add","path":"/spec/holderIdentity","value":"a"}]`, false},
		{"configmaps", patch, `[{"op":"add","path":"/metadata/annotations/control-plane.alpha.kubernetes.io~1leader","value":"{\"holderIdentity\":\"a\"}"}]`, true},
		{"configmaps", merge, `{"metadata":{"annotations":{"control-plane.alpha.kubernetes.io/leader":"{\"holderIdentity\":\"a\"}"}}}`, true},
		{"configmaps", merge, `{"metadata":{"annotations":{"control-plane.alpha.kubernetes.io/leader":null}}}`, false},
		{"leases", "application/cbor", "x", false},
		{"leases", jsonType, "{", false},
		{"leases", protoType, "k8s\x00\xff", false},
	} {
		_, ok, _ := lock.FindRecord(c.resource, c.contentType, []byte(c.body))
		require.Equal(t, c.found, ok, "%s %s %s", c.resource, c.contentType, c.body)
	}
}

// FuzzFindRecord checks that what the apiserver would read as a lock held by somebody
// is found.
func FuzzFindRecord(f *testing.F) {
	lease, err := json.Marshal(elected("pod_1"))
	require.NoError(f, err)
	f.Add(lease, uint8(0))
	f.Add(encode(f, elected("pod_1")), uint8(1))
	f.Add([]byte(`[{"op":"replace","path":"/spec/holderIdentity","value":"a"}]`), uint8(2))
	f.Add([]byte(`[{"op":"replace","path":"0","value":"0"}]`), uint8(2))
	f.Add([]byte("spec: {holderIdentity: a}"), uint8(3))
	types := []string{jsonType, protoType, "application/json-patch+json", "application/apply-patch+yaml"}
	f.Fuzz(func(t *testing.T, in []byte, contentType uint8) {
		media := types[int(contentType)%len(types)]
		_, _, _ = lock.FindRecord("configmaps", media, in)
		r, found, _ := lock.FindRecord("leases", media, in)
		if found {
			require.NotEmpty(t, r.Holder)
		}
		if media != protoType {
			return
		}
		o, err := runtime.Decode(protoCodec, in)
		lease, ok := o.(*coordinationv1.Lease)
		if err != nil || !ok {
			return
		}
		s := lease.Spec
		elects := s.HolderIdentity != nil && *s.HolderIdentity != "" && s.LeaseDurationSeconds != nil && s.AcquireTime != nil && s.LeaseTransitions != nil
		require.Equal(t, elects, found)
		if found {
			require.Equal(t, lock.Record{Name: lease.Name, Holder: *s.HolderIdentity}, r)
		}
	})
}
