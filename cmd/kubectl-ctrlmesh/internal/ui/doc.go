// Package ui serves pages that show the mesh, with the permissions of the user who runs it.
//
//	server.go  who may read what: hosts, the session, bounds
//	live.go    pages that follow the cluster
//	pages.go   what each page shows
//	templates/ and static/ are embedded
package ui
