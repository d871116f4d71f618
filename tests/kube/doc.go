// Package kube is what the tests do to a cluster: find it, apply manifests, wait,
// run commands in pods and on nodes, and read logs, those of agents and apiserver
// included.
//
// Nothing here sleeps for a fixed time: [Until] asks until the answer is the wanted
// one or the context ends, and then tells what was still wrong.
package kube
