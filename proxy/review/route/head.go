// Package route decides which shard answers a review that the apiserver sends to an
// operator's webhook.
//
// The package is pure: it reads the beginning of a review, and decides by values.
package route

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"

	"k8s.io/apimachinery/pkg/runtime/schema"
)

// Kind is what a webhook is asked for.
type Kind string

// Kinds.
const (
	Admission  Kind = "AdmissionReview"
	Conversion Kind = "ConversionReview"
)

// Head is what a review is about. Of a ConversionReview only Review and APIVersion may be
// set.
type Head struct {
	Review      Kind
	APIVersion  string
	UID         string
	Kind        schema.GroupVersionKind
	Resource    schema.GroupVersionResource
	Subresource string
	Name        string
	Namespace   string
	Operation   string
}

// ErrForm means that a body is no review that the package knows, or has no head in its beginning.
var ErrForm = errors.New("not a review of admission.k8s.io or apiextensions.k8s.io")

// Read reads the head of a review from its beginning, or all of it. It skips the object without
// decoding it.
//
// Members may be in any order. A member of the head that occurs twice in what is read is an
// [ErrForm], because readers disagree about its meaning. Read does not look at what follows the
// head: only the apiserver's reviews have an effect, and it sends each member once.
//
// The decoder looks at the same spaces anew after each part that arrives. So it gets all at once.
func Read(beginning []byte) (Head, error) {
	s := &scan{Decoder: json.NewDecoder(bytes.NewReader(beginning)), seen: map[string]bool{}}
	err := s.review()
	if err == nil || errors.Is(err, errComplete) {
		err = s.head.check()
	}
	switch {
	case err == nil:
		return s.head, nil
	case !errors.Is(err, ErrForm):
		err = fmt.Errorf("%w: %w", ErrForm, err)
	}
	return Head{}, fmt.Errorf("reading the head of a review: %w", err)
}

// check requires what every review of a known version has.
func (h *Head) check() error {
	switch {
	case h.Review == Conversion && (h.APIVersion == "apiextensions.k8s.io/v1" || h.APIVersion == "apiextensions.k8s.io/v1beta1"):
		return nil
	case h.Review != Admission || h.APIVersion != "admission.k8s.io/v1" && h.APIVersion != "admission.k8s.io/v1beta1":
		return fmt.Errorf("%w: kind %.64q, apiVersion %.64q", ErrForm, h.Review, h.APIVersion)
	case h.UID == "" || h.Operation == "" || h.Resource.Resource == "":
		return fmt.Errorf("%w: it has no uid, operation or resource", ErrForm)
	}
	return nil
}

// errComplete ends a scan.
var errComplete = errors.New("the head is complete")

// scan walks over a review.
type scan struct {
	*json.Decoder
	head Head
	seen map[string]bool // of parts
}

// kind and resource are a Kind and a Resource as JSON.
type (
	kind struct {
		Group   string `json:"group"`
		Version string `json:"version"`
		Kind    string `json:"kind"`
	}
	resource struct {
		Group    string `json:"group"`
		Version  string `json:"version"`
		Resource string `json:"resource"`
	}
)

// parts are the members that make up a head, by their paths. Each may occur once.
var parts = map[string]struct{}{
	"kind": {}, "apiVersion": {}, "request": {}, "request.uid": {}, "request.kind": {}, "request.resource": {},
	"request.subResource": {}, "request.name": {}, "request.namespace": {}, "request.operation": {},
}

// complete reports whether nothing that follows can be a part of the head. A review without
// namespace has none only once its request has ended.
func (s *scan) complete() bool {
	if !s.seen["kind"] || !s.seen["apiVersion"] {
		return false
	}
	if s.head.Review != Admission {
		return true
	}
	for _, member := range []string{"uid", "kind", "resource", "operation"} {
		if !s.seen["request."+member] {
			return false
		}
	}
	return s.head.Namespace != "" || s.seen["request"]
}

func (s *scan) review() error {
	return s.members("", func(member string) error {
		switch member {
		case "kind":
			return s.Decode(&s.head.Review)
		case "apiVersion":
			return s.Decode(&s.head.APIVersion)
		case "request":
			return s.members("request.", s.request)
		}
		return s.skip()
	})
}

func (s *scan) request(member string) error {
	switch member {
	case "uid":
		return s.Decode(&s.head.UID)
	case "kind":
		return s.Decode((*kind)(&s.head.Kind))
	case "resource":
		return s.Decode((*resource)(&s.head.Resource))
	case "subResource":
		return s.Decode(&s.head.Subresource)
	case "name":
		return s.Decode(&s.head.Name)
	case "namespace":
		return s.Decode(&s.head.Namespace)
	case "operation":
		return s.Decode(&s.head.Operation)
	}
	return s.skip()
}

// members calls f with each member of an object, before its value, which f walks over.
func (s *scan) members(path string, f func(member string) error) error {
	token, err := s.Token()
	if err != nil {
		return err
	}
	if token != json.Delim('{') {
		return fmt.Errorf("%w: it is not an object", ErrForm)
	}
	for s.More() {
		token, err := s.Token()
		if err != nil {
			return err
		}
		member, ok := token.(string)
		if !ok || s.seen[path+member] {
			return fmt.Errorf("%w: %.64q occurs twice", ErrForm, path+member)
		}
		if err := f(member); err != nil {
			return err
		}
		if _, known := parts[path+member]; known {
			s.seen[path+member] = true
		}
		if s.complete() {
			return errComplete
		}
	}
	_, err = s.Token()
	return err
}

// skip walks over a value.
func (s *scan) skip() error {
	var value json.RawMessage
	return s.Decode(&value)
}
