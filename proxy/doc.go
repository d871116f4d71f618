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
//	applied, err := pod.Apply(policy)
//	err = pod.Serve(listener) // until pod.Drain or pod.Shutdown
//
// # A request
//
//	downstream.go    net/http hands the request over; from here on it is a value
//	request.go       request: as it came, never changed; outgoing: what stages edit
//	classify.go      what it asks for, by its path, as the apiserver reads it
//	exchange.go      run: evaluate, send, conclude; start over if the policy changed
//	plan.go          the stages of each verb and resource, resolved once by the policy
//	outcome.go       how a stage ends a request: refusal, restart, reset
//	forward.go       to the apiserver, by a client of package upstream
//	response.go      the stages of the response, then to the client as it comes
//	access.go        accounting and the access line
//
// What stages decide by is in packages that know no request: isolation (what belongs to
// other shards), relist (which caches must list again), writes (which writes may still
// take effect), lock, limit and fault. Package metrics has the series.
//
// Every decision is a stage, a small type with one job. Those of a policy's gate decide
// who may ask: certificate, contradiction, classification, token. Those of the plan
// decide the rest, in order: upgrade, admission to a budget (budget.go), lock
// (locks.go), election, root CA, isolation, scope, standby or fence, narrowing, relist
// (relisting.go), stale lists, limits, faults, connections. A stage that has nothing to do
// about a verb and resource is not in its plan. A stage edits what is sent, asks for a
// stage of the response, or ends the request. If the policy changes before the request
// leaves, it is evaluated anew, as it came. What the apiserver answers streams back
// untouched unless a stage asked for it.
//
// # Lists and watches
//
// Of a divided resource they have the shard's objects alone. The apiserver is asked
// for those in a shardSelector where one says exactly what is owned (narrowing.go),
// and its answer is filtered (filtering.go): all of a watch, and of a list that
// does not echo the selector. What cannot be filtered is not passed on: 406. A list
// or watch in a foreign namespace is empty, by a selector that nothing matches.
// Objects without a namespace are everybody's when namespaces decide.
//
// # Who asks
//
// The listener says which pod asks. A token that is bound to another pod is
// refused with 403 unless the policy allows any (token.go); a client certificate,
// which cannot pass a TLS terminator, with 401. A policy of passthrough has the
// pod's connections tunnelled to the apiserver unseen (passthrough.go).
//
// # Whose an object is
//
// Requests for single objects of divided resources are the shard's by the path's
// namespace, or by the object's uid (fence.go, object.go); those for another
// shard's are refused with 403. The lock is exempt. Writes count until nothing can
// come of them any more, and do not end with their client (inflight.go): a policy
// has settled when those of all earlier ones are over.
//
// # Rules
//
// What passed all that is asked of rules: first of those that limit (proxy/limit,
// limiting.go), then of those that inject faults (proxy/fault, faulting.go). How a request fares
// that was sent on, or that a fault answered, counts in the rules that limit; what the
// proxy says of itself does not, and a client that went away tells nothing.
//
// # Other hosts
//
// ServeEgress serves the pod's redirected connections to other hosts (egressing.go,
// package egress), with accounts of their own from the same pools.
//
// # Bounds
//
// Everything that a pod can make the proxy hold is bounded for that pod, by
// refusing what is beyond: never by waiting in Accept (conn.go, budget.go).
// What has a second figure is bounded for the node too, at twice as much: each
// pod has the second for itself, and beyond it never more than is left for the
// others.
//
//	1024, 32       connections
//	32, 4          of them HTTP/2, with 512 streams each; others get HTTP/1.1
//	64, 4 MiB      what handshakes and heads that are not whole hold, taken as
//	               16 times what was sent
//	64, 2 MiB      held by short requests under way: 429 beyond
//	32, 2 MiB      held by watches and other long ones: 429 beyond
//	512 KiB        that only requests about the lock can use, before the 64 MiB
//	64, 4 MiB      kept to filter protobuf lists and large objects: 429 beyond. Events
//	               that faults hold back are kept there too: beyond it they pass
//	1024           watches whose client faults keep something from, or kept it when
//	               they ended: events of others are not dropped
//	64             requests told 429; further ones are cut off
//	128 KiB        the head of one request: 431 beyond. The apiserver takes 1 MiB
//	4, 8           handshakes computed at once, with the pod and with the apiserver
//	100/s          requests dropped by the client before the answer, 1000 at once
//	10 s           for a handshake or a head
//	45 to 60 s     without reading anything on a connection
//	60 s           without reading, on an HTTP/2 stream, the 64 KiB sent last
//
// A request is in its budget until net/http waits for the client no more. It is
// weighed before it is looked at, as what its head can become: 128 bytes for each
// field beside its own, 384 for each part of the target.
//
// # Handing over
//
// Drain lets another proxy on the same listener take over without a failed
// request or a list (drain.go). Only where faults may drop events of watches do
// clients list once: the next proxy does not know what they missed.
//
// # What never happens
//
// The proxy dials only the addresses of the Cluster, whatever a request says. It
// adds no credential. It sends no write twice. Before a policy came it passes
// nothing. A refusal is a metav1.Status that names ctrlmesh.
package proxy
