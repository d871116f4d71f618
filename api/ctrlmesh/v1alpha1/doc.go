// Package v1alpha1 holds the custom resources of the group
// ctrlmesh.kusionstack.io, and the labels and annotations that act as API.
//
// +kubebuilder:object:generate=true
// +groupName=ctrlmesh.kusionstack.io
package v1alpha1
