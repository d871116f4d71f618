// Package nri hears from the container runtime, by its Node Resource Interface,
// of the labelled pods' sandboxes: the runtime waits for the answer before it
// makes the first container. Where the runtime has no such interface, nothing is
// heard, and pods are found as the API tells of them.
package nri
