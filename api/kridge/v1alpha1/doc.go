// Package v1alpha1 holds the custom resources of the group kridge.kusionstack.io, as Kridge
// defines them. The manager translates them to the kinds of ctrlmesh.kusionstack.io.
//
// +kubebuilder:object:generate=true
// +groupName=kridge.kusionstack.io
package v1alpha1
