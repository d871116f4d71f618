// Command bench measures what a proxy costs between a client and the cluster's
// real apiserver: nothing at all (direct), a plain httputil.ReverseProxy, HAProxy
// and ctrlmesh, in turns within one run. run.sh starts it where the apiserver is.
//
//	bench run       measure, print the tables
//	bench filter    measure lists that ctrlmesh filters beside those that it passes
//	bench plain     be the ReverseProxy
//	bench mesh      be ctrlmesh
//	bench informer  be a client in a pod: an informer of ConfigMaps
//	bench watcher   be a client in a pod: one watch of ConfigMaps
//
// Every proxy is a process of its own, so that its CPU time and memory can be
// read, and takes its listener as file descriptor 3.
package main
