package route

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	admissionv1 "k8s.io/api/admission/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// review is an AdmissionReview as the apiserver encodes it.
func review(t testing.TB, version, namespace, object string) []byte {
	t.Helper()
	body, err := json.Marshal(&admissionv1.AdmissionReview{
		TypeMeta: metav1.TypeMeta{Kind: "AdmissionReview", APIVersion: version},
		Request: &admissionv1.AdmissionRequest{
			UID:         "705ab4f5",
			Kind:        metav1.GroupVersionKind{Group: "apps", Version: "v1", Kind: "Deployment"},
			Resource:    metav1.GroupVersionResource{Group: "apps", Version: "v1", Resource: "deployments"},
			SubResource: "scale",
			Name:        "a",
			Namespace:   namespace,
			Operation:   admissionv1.Update,
			Object:      runtime.RawExtension{Raw: []byte(object)},
		},
	})
	require.NoError(t, err)
	return body
}

func head(version, namespace string) Head {
	return Head{
		Review: Admission, APIVersion: version, UID: "705ab4f5",
		Kind:        schema.GroupVersionKind{Group: "apps", Version: "v1", Kind: "Deployment"},
		Resource:    schema.GroupVersionResource{Group: "apps", Version: "v1", Resource: "deployments"},
		Subresource: "scale", Name: "a", Namespace: namespace, Operation: "UPDATE",
	}
}

func TestHeadOfAnAdmissionReview(t *testing.T) {
	for _, version := range []string{"admission.k8s.io/v1", "admission.k8s.io/v1beta1"} {
		for _, namespace := range []string{"ns", ""} {
			body := review(t, version, namespace, `{"request":{"namespace":"another"},"x":"`+strings.Repeat("y", 100_000)+`"}`)
			parts := map[string][]byte{"whole": body}
			if namespace != "" { // else all of the request shows that there is none
				parts["beginning"] = body[:10_000]
			}
			for name, part := range parts {
				t.Run(version+" "+namespace+" "+name, func(t *testing.T) {
					h, err := Read(part)
					require.NoError(t, err)
					require.Equal(t, head(version, namespace), h)
				})
			}
		}
	}
}

func TestMembersInAnyOrder(t *testing.T) {
	body := `{"request":{"object":{"a":[{"b":null}]},"operation":"UPDATE","name":"a","namespace":"ns","subResource":"scale",
		"resource":{"group":"apps","version":"v1","resource":"deployments"},"kind":{"group":"apps","version":"v1","kind":"Deployment"},
		"uid":"705ab4f5","dryRun":true},"extra":[1,2],"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview"}`
	h, err := Read([]byte(body))
	require.NoError(t, err)
	require.Equal(t, head("admission.k8s.io/v1", "ns"), h)
}

func TestConversionReviewsAreDistinguished(t *testing.T) {
	for _, body := range []string{
		`{"kind":"ConversionReview","apiVersion":"apiextensions.k8s.io/v1","request":{"uid":"u","objects":[`,
		`{"request":{"uid":"u","desiredAPIVersion":"x/v1","objects":[{}]},"apiVersion":"apiextensions.k8s.io/v1","kind":"ConversionReview"}`,
	} {
		h, err := Read([]byte(body))
		require.NoError(t, err)
		require.Equal(t, Conversion, h.Review)
	}
}

func TestInvalidReviewsAreRejected(t *testing.T) {
	const start = `{"kind":"AdmissionReview","apiVersion":"admission.k8s.io/v1","request":{"uid":"u",`
	for name, body := range map[string]string{
		"empty":              "",
		"null":               "null",
		"an array":           "[]",
		"no JSON":            "\x00\x01",
		"no members":         "{}",
		"truncated":          start,
		"another kind":       `{"kind":"Pod","apiVersion":"v1"}`,
		"another version":    `{"kind":"AdmissionReview","apiVersion":"admission.k8s.io/v9","request":{}}`,
		"no request":         `{"kind":"AdmissionReview","apiVersion":"admission.k8s.io/v1"}`,
		"request is null":    `{"kind":"AdmissionReview","apiVersion":"admission.k8s.io/v1","request":null}`,
		"uid is a number":    `{"kind":"AdmissionReview","apiVersion":"admission.k8s.io/v1","request":{"uid":1}}`,
		"resource is a text": start + `"resource":"pods"}}`,
		"no operation":       start + `"resource":{"resource":"pods"}}}`,
		"namespace twice":    start + `"namespace":"a","namespace":"b"}}`,
		"request twice":      `{"request":{},"request":{}}`,
		"deep":               start + `"object":` + strings.Repeat("[", 100_000),
		"without an end":     start + `"object":"` + strings.Repeat("x", 100_000),
	} {
		t.Run(name, func(t *testing.T) {
			h, err := Read([]byte(body))
			require.ErrorIs(t, err, ErrForm)
			require.Zero(t, h)
		})
	}
}

func TestAllowedIsACompleteResponse(t *testing.T) {
	for _, version := range []string{"admission.k8s.io/v1", "admission.k8s.io/v1beta1"} {
		h, err := Read(review(t, version, "ns", "{}"))
		require.NoError(t, err)
		var got admissionv1.AdmissionReview
		require.NoError(t, json.Unmarshal(Allowed(h), &got))
		require.Equal(t, admissionv1.AdmissionReview{
			TypeMeta: metav1.TypeMeta{Kind: "AdmissionReview", APIVersion: version},
			Response: &admissionv1.AdmissionResponse{UID: "705ab4f5", Allowed: true},
		}, got)
	}
}

// What Read finds is what a webhook would decode, of all that the apiserver can encode.
func FuzzRead(f *testing.F) {
	f.Add(review(f, "admission.k8s.io/v1", "ns", `{"a":[1,{"b":"\ud800"}]}`))
	f.Add(review(f, "admission.k8s.io/v1beta1", "", `null`))
	f.Add([]byte(`{"request":{"uid":"\u0000","namespace":null},"kind":"AdmissionReview","apiVersion":"admission.k8s.io/v1"}`))
	f.Add([]byte(`{"kind":"ConversionReview","apiVersion":"apiextensions.k8s.io/v1"}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		_, _ = Read(body)
		var decoded admissionv1.AdmissionReview
		if json.Unmarshal(body, &decoded) != nil || decoded.Request == nil {
			return
		}
		encoded, err := json.Marshal(decoded)
		if err != nil {
			return
		}
		h, err := Read(encoded)
		if err != nil {
			require.ErrorIs(t, err, ErrForm)
			return
		}
		if h.Review != Admission {
			return
		}
		r := decoded.Request
		require.Equal(t, Head{
			Review: Kind(decoded.Kind), APIVersion: decoded.APIVersion, UID: string(r.UID),
			Kind: schema.GroupVersionKind(r.Kind), Resource: schema.GroupVersionResource(r.Resource),
			Subresource: r.SubResource, Name: r.Name, Namespace: r.Namespace, Operation: string(r.Operation),
		}, h)
	})
}
