// Package agent is the mesh on one node: it finds the labelled pods, captures their
// apiserver traffic, and serves each by its policy with the proxy that it contains.
package agent
