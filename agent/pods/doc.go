// Package pods finds the labelled pods of one node: the pods in the Kubernetes API, their
// network namespaces in the node's cgroup tree.
package pods
