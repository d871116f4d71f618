package controllers

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// Kinds of which only the metadata is watched.
var (
	NamespaceKind = corev1.SchemeGroupVersion.WithKind("Namespace")
	NodeKind      = corev1.SchemeGroupVersion.WithKind("Node")
)

// MetadataOf returns an empty object of a kind, to read or watch its metadata.
func MetadataOf(kind schema.GroupVersionKind) *metav1.PartialObjectMetadata {
	o := &metav1.PartialObjectMetadata{}
	o.SetGroupVersionKind(kind)
	return o
}
