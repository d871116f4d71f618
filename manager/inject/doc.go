// Package inject admits labelled pods: it decides whom their clients will
// trust and, for those captured by address, whom they will talk to.
//
// Every projected volume of a pod gets the mesh's bundle in place of the
// cluster's CA. A member of a shard gets the mesh CA alone, so that without the
// proxy TLS itself refuses the apiserver; a pod that may be let go past the proxy
// gets both. The bundles are ConfigMaps in the pod's namespace, made before the
// pod is let in and kept right by the leader.
package inject
