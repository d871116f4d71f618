// Package proxy is the data plane: TLS and HTTP from a captured pod in, to the
// real apiserver out, the caller's credentials untouched.
//
// A [Server] serves the pods of one node. Each [Pod] has a listener, a policy and
// upstream connections of its own, and shares no lock with any other pod while a
// request passes:
//
//	srv, err := proxy.New(proxy.Config{Leaf: leaf, Registerer: registry})
//	err = srv.SetCluster(cluster)
//	pod := srv.Pod(proxy.PodInfo{UID: uid, Namespace: ns, Name: name}, dialInPod)
//	err = pod.SetPolicy(policy)
//	err = pod.Serve(listener) // until pod.Shutdown
//
// # A request
//
// It is classified by its path, as the apiserver would (classify.go). A path that
// two readers could read differently is refused. The policy holds a plan for each
// verb and resource: the stages that have something to say about it (lock, scope)
// and the way upstream (short, stream or upgrade). Then it is forwarded; what the
// apiserver answers streams back untouched, unless the lock's name is in it.
//
// # What never happens
//
// The proxy dials only the addresses of the Cluster, whatever a request says. It
// adds no credential. It sends no write twice. Before a policy came it passes
// nothing. A refusal is a metav1.Status that names ctrlmesh.
package proxy
