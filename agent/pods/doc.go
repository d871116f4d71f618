// Package pods knows the labelled pods of one node: which there are, from the
// Kubernetes API, and where their network namespaces are, from the node's
// cgroup tree.
package pods
