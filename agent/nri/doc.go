// Package nri receives the sandboxes of labelled pods from the container runtime, by its
// Node Resource Interface: the runtime waits for the answer before it creates the first
// container. Without such a runtime, the API announces pods a moment later.
package nri
