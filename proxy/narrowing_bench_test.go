package proxy

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/proxy/internal/policytest"
)

// BenchmarkFilteredList compares a list of 5,000 objects of 1 KB that is passed as
// it is with one that is filtered, of which all stays, or a fifth. The cost of
// client and apiserver is in every row.
func BenchmarkFilteredList(b *testing.B) {
	list := &corev1.ConfigMapList{ListMeta: metav1.ListMeta{ResourceVersion: "100"}}
	for i := range 5000 {
		list.Items = append(list.Items, corev1.ConfigMap{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: fmt.Sprintf("ns-%d", i%5), Name: fmt.Sprintf("config-%d", i), ResourceVersion: "7",
				UID: types.UID(fmt.Sprintf("00000000-0000-0000-0000-%012d", i)), Labels: map[string]string{"app": "bench"},
			},
			Data: map[string]string{"k": strings.Repeat("x", 1000)},
		})
	}
	namespaces := []string{"ns-0", "ns-1", "ns-2", "ns-3", "ns-4"}
	for _, media := range []string{jsonType, protoType} {
		body := wire(media, list)
		api := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", media)
			for p := body; len(p) > 0; { // as the apiserver does: no length, pieces
				n := min(len(p), 128<<10)
				_, _ = w.Write(p[:n])
				p = p[n:]
			}
		})
		for _, row := range []struct {
			name   string
			owned  sharding.Scope
			atMost int
		}{
			{"passed", sharding.All(), len(body)},
			{"all-kept", sharding.Keys(namespaces...), len(body)},
			{"fifth-kept", sharding.Keys(namespaces[0]), len(body) / 4},
		} {
			b.Run(media[strings.LastIndexAny(media, "/.")+1:]+"/"+row.name, func(b *testing.B) {
				m := newMesh(b, api)
				m.policy(policytest.Divided(row.owned, meshv1.Method_METHOD_FILTER))
				c := m.client(true)
				b.SetBytes(int64(len(body)))
				b.ReportAllocs()
				cpu := processCPU()
				for b.Loop() {
					req, err := http.NewRequest("GET", "https://kubernetes.default.svc/api/v1/configmaps", nil)
					require.NoError(b, err)
					req.Header.Set("Accept", media)
					resp, err := c.Do(req)
					require.NoError(b, err)
					n, err := io.Copy(io.Discard, resp.Body)
					_ = resp.Body.Close()
					require.NoError(b, err)
					require.Greater(b, n, int64(row.atMost/2))
					require.LessOrEqual(b, n, int64(row.atMost))
				}
				b.ReportMetric(float64((processCPU()-cpu).Microseconds())/float64(b.N), "cpu-us/op")
			})
		}
	}
}
