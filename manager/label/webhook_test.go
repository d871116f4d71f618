package label

import (
	"encoding/json"
	"testing"

	jsonpatch "github.com/evanphx/json-patch/v5"
	"github.com/stretchr/testify/require"
	admissionv1 "k8s.io/api/admission/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	"github.com/ctrlmesh/ctrlmesh/manager/platform"
)

func TestWebhooks(t *testing.T) {
	stamped := []schema.GroupResource{{Resource: "configmaps"}, {Group: "example.com", Resource: "foos"}, {Resource: "pods"}, {Resource: "services"}, {Group: "apps", Resource: "deployments"}}
	w := Webhooks(stamped, Service{Namespace: "mesh", Name: "svc"}, platform.Default())
	require.Len(t, w, 1)
	require.Len(t, w[0].Rules, 2, "without what has pod templates")
	require.Equal(t, []string{"configmaps", "services"}, w[0].Rules[0].Resources)
	require.Equal(t, []string{"foos"}, w[0].Rules[1].Resources)
	require.Len(t, w[0].MatchConditions, 2)
	require.Equal(t, []string{"mesh", "kube-system", "kube-node-lease"}, w[0].NamespaceSelector.MatchExpressions[0].Values)

	all, err := platform.Parse(map[string]string{platform.Key: "stamping: {excludedNamespaces: []}"})
	require.NoError(t, err)
	w = Webhooks(stamped, Service{Namespace: "mesh"}, all)
	require.Equal(t, []string{"mesh", "kube-system"}, w[0].NamespaceSelector.MatchExpressions[0].Values)
	require.Empty(t, Webhooks([]schema.GroupResource{{Resource: "pods"}}, Service{}, platform.Default()))
}

func TestExcludedResourcesAreNotInTheWebhook(t *testing.T) {
	listed := Listed(config("a", group([]string{""}, []string{"secrets", "configmaps"}), group([]string{"*"}, []string{"leases"})))
	w := Webhooks(Stamped(listed, served, platform.Default()), Service{Namespace: "mesh"}, platform.Default())
	require.Len(t, w, 1)
	require.Len(t, w[0].Rules, 1)
	require.Equal(t, []string{"configmaps"}, w[0].Rules[0].Resources)
	require.Equal(t,
		`!((request.resource.group == "ctrlmesh.kusionstack.io") || (request.resource.group == "" && request.resource.resource == "secrets") || (request.resource.group == "coordination.k8s.io" && request.resource.resource == "leases"))`,
		w[0].MatchConditions[0].Expression)
}

func TestStamp(t *testing.T) {
	right, err := json.Marshal(Of("ns-a"))
	require.NoError(t, err)
	for what, object := range map[string]string{
		"no labels":    `{"metadata":{"name":"x"},"data":{"a":"b"}}`,
		"null":         `{"metadata":{"name":"x","labels":null}}`,
		"others":       `{"metadata":{"labels":{"app":"foo"}}}`,
		"wrong":        `{"metadata":{"labels":{"app":"foo","ctrlmesh.kusionstack.io/namespace":"ns-b","ctrlmesh.kusionstack.io/sharding-hash":"99"}}}`,
		"right before": `{"metadata":{"labels":` + string(right) + `}}`,
	} {
		r := Stamp(t.Context(), admission.Request{AdmissionRequest: admissionv1.AdmissionRequest{
			Namespace: "ns-a", Object: runtime.RawExtension{Raw: []byte(object)},
		}})
		require.True(t, r.Allowed)
		ops, err := json.Marshal(r.Patches)
		require.NoError(t, err)
		p, err := jsonpatch.DecodePatch(ops)
		require.NoError(t, err)
		out, err := p.Apply([]byte(object))
		require.NoError(t, err, what)
		var before, after metav1.PartialObjectMetadata
		require.NoError(t, json.Unmarshal([]byte(object), &before))
		require.NoError(t, json.Unmarshal(out, &after))
		require.Subset(t, after.Labels, Of("ns-a"), what)
		require.Equal(t, before.Labels["app"], after.Labels["app"], what)
		if what == "right before" {
			require.Empty(t, r.Patches)
		}
	}
	r := Stamp(t.Context(), admission.Request{AdmissionRequest: admissionv1.AdmissionRequest{Object: runtime.RawExtension{Raw: []byte(`{"metadata":{}}`)}}})
	require.True(t, r.Allowed)
	require.Empty(t, r.Patches, "cluster-scoped")
}
