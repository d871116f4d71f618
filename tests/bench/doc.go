// Command bench measures the cost of a proxy between a client and the cluster's real
// apiserver: no proxy (direct), a plain httputil.ReverseProxy, HAProxy and ctrlmesh, in turns
// within one run. run.sh starts it in the network of the apiserver.
//
//	bench run       measures and prints the tables
//	bench filter    compares lists that ctrlmesh filters with those that it passes
//	bench plain     runs the ReverseProxy
//	bench mesh      runs ctrlmesh
//	bench informer  runs a client in a pod: an informer of ConfigMaps
//	bench watcher   runs a client in a pod: one watch of ConfigMaps
//
// Every proxy is a separate process, so that its CPU time and memory can be measured. It
// inherits its listener as file descriptor 3.
package main
