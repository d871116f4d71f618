package reviews

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"time"

	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	v1 "github.com/ctrlmesh/ctrlmesh/tests/operators/reviewer/v1"
	v2 "github.com/ctrlmesh/ctrlmesh/tests/operators/reviewer/v2"
)

const (
	v1Version = "v1"
	v2Version = "v2"

	// patience bounds one create, and one review.
	patience = 30 * time.Second
)

// Create creates an object with some labels.
func (s *Site) Create(ctx context.Context, namespace string, labels map[string]string) Outcome {
	return s.create(ctx, v2Version, namespace, labels, false)
}

// create creates an object of a version.
func (s *Site) create(ctx context.Context, version, namespace string, labels map[string]string, dryRun bool) Outcome {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	object := &metav1.PartialObjectMetadata{
		TypeMeta:   metav1.TypeMeta{APIVersion: v2.GroupVersion.Group + "/" + version, Kind: "Paper"},
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, GenerateName: "paper-", Labels: labels},
	}
	body, _ := json.Marshal(object) // strings have no error
	request := s.Clientset.CoreV1().RESTClient().Post().
		AbsPath("/apis", v2.GroupVersion.Group, version, "namespaces", namespace, "papers").
		SetHeader("Content-Type", runtime.ContentTypeJSON).SetHeader("Accept", runtime.ContentTypeJSON).Body(body)
	if dryRun {
		request.Param("dryRun", metav1.DryRunAll)
	}
	o := Outcome{Namespace: namespace, Start: time.Now()}
	result := request.Do(ctx)
	o.End = time.Now()
	if o.Err = result.Error(); o.Err != nil {
		return o
	}
	answer, err := result.Raw()
	if err == nil {
		err = json.Unmarshal(answer, object)
	}
	var warnings []string
	for _, w := range result.Warnings() {
		warnings = append(warnings, w.Text)
	}
	o.Name, o.Mutated, o.Validated, o.Err = object.Name, v2.Marked(object), v2.Warned(warnings), err
	return o
}

// Convert creates an object of v1 with a title. It reads it as v2, and as v1 again, and returns
// the heading and the title.
func (s *Site) Convert(ctx context.Context, namespace, title string) (heading, back string, err error) {
	paper := &v1.Paper{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, GenerateName: "converted-"}, Spec: v1.PaperSpec{Title: title}}
	if err := s.CreateAll(ctx, paper); err != nil {
		return "", "", err
	}
	key := types.NamespacedName{Namespace: namespace, Name: paper.Name}
	stored, again := &v2.Paper{}, &v1.Paper{}
	if err := s.Get(ctx, key, stored); err != nil {
		return "", "", fmt.Errorf("reading a Paper as v2: %w", err)
	}
	if err := s.Get(ctx, key, again); err != nil {
		return "", "", fmt.Errorf("reading a Paper as v1: %w", err)
	}
	return stored.Spec.Heading, again.Spec.Title, nil
}

// client returns a client of one pod's webhooks that connects from a pod outside the mesh, as
// the apiserver connects from outside the pod, with a connection for each request. It verifies
// the server as the apiserver does. url has no path.
func (s *Site) client(pod *corev1.Pod) (client *http.Client, url string) {
	at := net.JoinHostPort(pod.Status.PodIP, strconv.Itoa(Port))
	return &http.Client{Timeout: patience, Transport: &http.Transport{
		DialContext:       func(ctx context.Context, _, _ string) (net.Conn, error) { return s.dial(ctx, at) },
		TLSClientConfig:   &tls.Config{RootCAs: s.authority.pool(), ServerName: s.serverName(), MinVersion: tls.VersionTLS12},
		DisableKeepAlives: true,
	}}, "https://" + at
}

// Ask sends a review about a create in a namespace to one pod. It returns the reviewer that validated.
func (s *Site) Ask(ctx context.Context, pod *corev1.Pod, namespace string) (v2.Reviewer, error) {
	answer, err := s.ask(ctx, pod, namespace)
	if err != nil {
		return v2.Reviewer{}, fmt.Errorf("sending a review to pod %s: %w", pod.Name, err)
	}
	return v2.Warned(answer.Warnings), nil
}

func (s *Site) ask(ctx context.Context, pod *corev1.Pod, namespace string) (*admissionv1.AdmissionResponse, error) {
	client, url := s.client(pod)
	paper := &v2.Paper{
		TypeMeta:   metav1.TypeMeta{APIVersion: v2.GroupVersion.String(), Kind: "Paper"},
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "asked"},
	}
	raw, _ := json.Marshal(paper) // strings have no error
	body, _ := json.Marshal(&admissionv1.AdmissionReview{
		TypeMeta: metav1.TypeMeta{APIVersion: admissionv1.SchemeGroupVersion.String(), Kind: "AdmissionReview"},
		Request: &admissionv1.AdmissionRequest{
			UID:       "asked",
			Kind:      metav1.GroupVersionKind{Group: v2.GroupVersion.Group, Version: v2Version, Kind: "Paper"},
			Resource:  metav1.GroupVersionResource{Group: v2.GroupVersion.Group, Version: v2Version, Resource: "papers"},
			Name:      paper.Name,
			Namespace: namespace,
			Operation: admissionv1.Create,
			Object:    runtime.RawExtension{Raw: raw},
			DryRun:    new(true),
		},
	})
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, url+validatePath, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	request.Header.Set("Content-Type", "application/json")
	resp, err := client.Do(request)
	if err != nil {
		return nil, err
	}
	defer func() { _ = resp.Body.Close() }()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		return nil, err
	}
	var answer admissionv1.AdmissionReview
	if err := json.Unmarshal(text, &answer); err != nil || answer.Response == nil || !answer.Response.Allowed {
		return nil, fmt.Errorf("%s: %.500s", resp.Status, text)
	}
	return answer.Response, nil
}

// Presented returns the serial number of the certificate that clients of a pod get.
func (s *Site) Presented(ctx context.Context, pod *corev1.Pod) (int64, error) {
	client, url := s.client(pod)
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url+validatePath, nil)
	if err != nil {
		return 0, err
	}
	resp, err := client.Do(request) // the webhook refuses a GET
	if err != nil {
		return 0, fmt.Errorf("connecting to pod %s: %w", pod.Name, err)
	}
	_ = resp.Body.Close()
	return resp.TLS.PeerCertificates[0].SerialNumber.Int64(), nil
}

// Listens returns an error unless a connection to a pod's webhooks is accepted.
func (s *Site) Listens(ctx context.Context, pod *corev1.Pod) error {
	_, _, err := s.Exec(ctx, s.Home, s.outside.Name, "", "sh", "-c", `nc "$@" </dev/null`, "sh", pod.Status.PodIP, strconv.Itoa(Port))
	return err
}
