// Package v1alpha1 holds the custom resources of the group ctrlmesh.kruise.io, as
// openkruise/controllermesh defines them. The manager translates them to the kinds of
// ctrlmesh.kusionstack.io.
//
// +kubebuilder:object:generate=true
// +groupName=ctrlmesh.kruise.io
package v1alpha1
