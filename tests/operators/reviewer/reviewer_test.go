package main

import (
	"bytes"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/require"
	admissionv1 "k8s.io/api/admission/v1"
	apiextensions "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"
	"sigs.k8s.io/controller-runtime/pkg/webhook/conversion"

	v1 "github.com/ctrlmesh/ctrlmesh/tests/operators/reviewer/v1"
	v2 "github.com/ctrlmesh/ctrlmesh/tests/operators/reviewer/v2"
)

var self = v2.Reviewer{Version: "new", Pod: "new-0"}

func create(t *testing.T, labels map[string]string) admission.Request {
	t.Helper()
	raw, err := json.Marshal(&v2.Paper{
		TypeMeta:   metav1.TypeMeta{APIVersion: v2.GroupVersion.String(), Kind: "Paper"},
		ObjectMeta: metav1.ObjectMeta{Name: "p", Namespace: "ns", Labels: labels},
	})
	require.NoError(t, err)
	return admission.Request{AdmissionRequest: admissionv1.AdmissionRequest{Operation: admissionv1.Create, Object: runtime.RawExtension{Raw: raw}}}
}

func TestReviewsNameTheReviewer(t *testing.T) {
	scheme, err := newScheme()
	require.NoError(t, err)
	mutated := admission.WithDefaulter(scheme, reviewer{self}).Handle(t.Context(), create(t, nil))
	require.True(t, mutated.Allowed)
	require.Len(t, mutated.Patches, 1)
	require.Equal(t, map[string]any{v2.VersionAnnotation: "new", v2.PodAnnotation: "new-0"}, mutated.Patches[0].Value)

	validate := admission.WithValidator(scheme, reviewer{self})
	valid := validate.Handle(t.Context(), create(t, nil))
	require.True(t, valid.Allowed)
	require.Equal(t, self, v2.Warned(valid.Warnings))
	refused := validate.Handle(t.Context(), create(t, map[string]string{v2.RefusedLabel: ""}))
	require.False(t, refused.Allowed)
	require.Contains(t, refused.Result.Message, "version new in pod new-0 refuses")
	require.Zero(t, v2.Warned([]string{"something else"}))
}

func TestPapersAreConvertedBothWays(t *testing.T) {
	scheme, err := newScheme()
	require.NoError(t, err)
	ok, err := conversion.IsConvertible(scheme, &v2.Paper{})
	require.NoError(t, err)
	require.True(t, ok)
	handler := conversion.NewWebhookHandler(scheme, conversion.NewRegistry())
	convert := func(to string, from any) []byte {
		raw, err := json.Marshal(from)
		require.NoError(t, err)
		body, err := json.Marshal(&apiextensions.ConversionReview{
			TypeMeta: metav1.TypeMeta{APIVersion: "apiextensions.k8s.io/v1", Kind: "ConversionReview"},
			Request:  &apiextensions.ConversionRequest{UID: "u", DesiredAPIVersion: to, Objects: []runtime.RawExtension{{Raw: raw}}},
		})
		require.NoError(t, err)
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, httptest.NewRequest(http.MethodPost, "/convert", bytes.NewReader(body)))
		var answer apiextensions.ConversionReview
		require.NoError(t, json.Unmarshal(w.Body.Bytes(), &answer), w.Body.String())
		require.Equal(t, metav1.StatusSuccess, answer.Response.Result.Status, answer.Response.Result.Message)
		return answer.Response.ConvertedObjects[0].Raw
	}
	old := v1.Paper{TypeMeta: metav1.TypeMeta{APIVersion: v1.GroupVersion.String(), Kind: "Paper"}, ObjectMeta: metav1.ObjectMeta{Name: "p"}, Spec: v1.PaperSpec{Title: "t"}}
	var hub v2.Paper
	require.NoError(t, json.Unmarshal(convert(v2.GroupVersion.String(), old), &hub))
	require.Equal(t, v2.PaperSpec{Heading: "t"}, hub.Spec)
	require.Equal(t, "p", hub.Name)
	var back v1.Paper
	require.NoError(t, json.Unmarshal(convert(v1.GroupVersion.String(), hub), &back))
	require.Equal(t, old, back)
}
