// Package ui serves pages that show the mesh, with the permissions of the user who runs it.
//
//	server.go  who may read what: hosts, the token, bounds
//	live.go    pages that follow the cluster
//	pages.go   which pages there are
//	mesh.go    pages of the mesh and its operators
//	costs.go   the page of what operators cost the apiserver
//	pod.go     pages of a pod, and of advice about a workload
//	templates/ and static/ are embedded
package ui
