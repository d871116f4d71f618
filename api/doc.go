// Package api holds what users write (custom resources) and what the manager
// and the agents say to each other (the mesh protocol). It has no behaviour.
package api
