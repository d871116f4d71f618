package v2

import (
	"fmt"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

var (
	// GroupVersion is the group and version of Paper.
	GroupVersion = schema.GroupVersion{Group: "reviewer.example.com", Version: "v2"}

	builder = runtime.NewSchemeBuilder(func(scheme *runtime.Scheme) error {
		scheme.AddKnownTypes(GroupVersion, &Paper{}, &PaperList{})
		metav1.AddToGroupVersion(scheme, GroupVersion)
		return nil
	})

	// AddToScheme adds Paper to a scheme.
	AddToScheme = builder.AddToScheme
)

const (
	// VersionAnnotation is set on a created Paper: the version of the operator that mutated it.
	VersionAnnotation = "reviewer.example.com/version"
	// PodAnnotation is set on a created Paper: the pod of that process.
	PodAnnotation = "reviewer.example.com/pod"
	// RefusedLabel marks a Paper that the operator refuses, whatever its value.
	RefusedLabel = "reviewer.example.com/refused"

	warning = "validated by version "
)

// Paper is an object that the operator mutates, validates and converts.
type Paper struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata"`

	Spec PaperSpec `json:"spec"`
}

// PaperSpec is the part that a user writes.
type PaperSpec struct {
	// Heading is spec.title of v1.
	Heading string `json:"heading,omitempty"`
}

// PaperList is a list of Papers.
type PaperList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata"`

	Items []Paper `json:"items"`
}

// Hub makes Paper the version that others are converted to and from.
func (*Paper) Hub() {}

// Reviewer is a process of the operator.
type Reviewer struct{ Version, Pod string }

// Mark records in a Paper that r mutated it.
func (r Reviewer) Mark(p *Paper) {
	if p.Annotations == nil {
		p.Annotations = map[string]string{}
	}
	p.Annotations[VersionAnnotation], p.Annotations[PodAnnotation] = r.Version, r.Pod
}

// Marked returns the reviewer that mutated an object, by its annotations.
func Marked(o metav1.Object) Reviewer {
	return Reviewer{o.GetAnnotations()[VersionAnnotation], o.GetAnnotations()[PodAnnotation]}
}

// Warning returns the warning of a validation, which names r.
func (r Reviewer) Warning() string { return warning + r.Version + " in pod " + r.Pod }

// Warned returns the reviewer that validated an object, by the warnings of the response. It
// returns the zero Reviewer if no warning names one.
func Warned(warnings []string) (r Reviewer) {
	for _, w := range warnings {
		if rest, ok := strings.CutPrefix(w, warning); ok {
			r.Version, r.Pod, _ = strings.Cut(rest, " in pod ")
		}
	}
	return r
}

// Refusal returns why a Paper is refused; nil if it is not.
func (r Reviewer) Refusal(p *Paper) error {
	if _, refused := p.Labels[RefusedLabel]; !refused {
		return nil
	}
	return fmt.Errorf("version %s in pod %s refuses label %s", r.Version, r.Pod, RefusedLabel)
}
