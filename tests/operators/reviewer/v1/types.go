// Package v1 defines the first version of Paper, which the operator reviewer converts to and
// from v2.
package v1

import (
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/conversion"

	v2 "github.com/ctrlmesh/ctrlmesh/tests/operators/reviewer/v2"
)

var (
	// GroupVersion is the group and version of Paper.
	GroupVersion = schema.GroupVersion{Group: v2.GroupVersion.Group, Version: "v1"}

	builder = runtime.NewSchemeBuilder(func(scheme *runtime.Scheme) error {
		scheme.AddKnownTypes(GroupVersion, &Paper{})
		metav1.AddToGroupVersion(scheme, GroupVersion)
		return nil
	})

	// AddToScheme adds Paper to a scheme.
	AddToScheme = builder.AddToScheme
)

// Paper is a v2.Paper with another name of its field.
type Paper struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata"`

	Spec PaperSpec `json:"spec"`
}

// PaperSpec is the part that a user writes.
type PaperSpec struct {
	// Title is spec.heading of v2.
	Title string `json:"title,omitempty"`
}

// ConvertTo converts p to v2.
func (p *Paper) ConvertTo(hub conversion.Hub) error {
	out, ok := hub.(*v2.Paper)
	if !ok {
		return fmt.Errorf("cannot convert a Paper to %T", hub)
	}
	p.DeepCopyInto(&out.ObjectMeta)
	out.Spec.Heading = p.Spec.Title
	return nil
}

// ConvertFrom converts a Paper of v2 to p.
func (p *Paper) ConvertFrom(hub conversion.Hub) error {
	in, ok := hub.(*v2.Paper)
	if !ok {
		return fmt.Errorf("cannot convert %T to a Paper", hub)
	}
	in.ObjectMeta.DeepCopyInto(&p.ObjectMeta)
	p.Spec.Title = in.Spec.Heading
	return nil
}

// DeepCopyObject makes Paper a runtime.Object.
func (p *Paper) DeepCopyObject() runtime.Object {
	out := *p
	p.DeepCopyInto(&out.ObjectMeta)
	return &out
}
