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
//	conn.go            the server of the pod's clients, by package downstream
//	downstream.go      the server hands the request over; from here on it is a value
//	exchange.go        run: evaluate, send, conclude; start over if the policy changed
//	pipeline           the request, what is decided about it, how a stage ends it
//	pipeline/stages    the policy, and its stages for each verb and resource
//	forward.go         to the apiserver, by a client of package upstream; the stages of the
//	                   response
//	response.go        the response, to the client as it comes
//	conclude.go        refusals; accounting and the access line
//
// What stages decide by is in packages that know no request: isolation (what belongs to
// other shards), relist (which caches must be filled again), writes (which writes may still
// take effect), lock, limit and fault. Package metrics has the series, and activity counts
// what the manager compares among shards.
//
// Every decision is a stage, a small type with one job. Those of a policy's gate decide
// who may send requests, and those of the plan for a verb and resource all else:
// pipeline/stages/plan.go lists both in order. A stage that has nothing to do for a verb and
// resource is not in its plan. A stage edits what is sent, asks for a stage of the response, or
// ends the request. If the policy has changed after an injected delay, at the ledger, before a
// connection opens or before a write counts, the request is evaluated anew, as it came.
// The apiserver's response streams back unchanged unless a stage asked for it.
//
// # Lists and watches
//
// Those of a divided resource contain only the shard's objects. The proxy asks the
// apiserver for these by a shardSelector if one expresses exactly what the shard owns. It
// filters every watch, and each list that does not echo the selector
// (pipeline/stages/narrowing.go). A response that cannot be filtered is refused: 406. A
// list or watch in a foreign namespace is empty, by a selector that matches nothing. With
// namespaces as keys, every shard gets objects without a namespace.
//
// # Callers
//
// The listener identifies the pod. A token that is bound to another pod is
// refused with 403 unless the policy allows any (caller.go); a client certificate,
// which cannot pass a TLS terminator, with 401. A policy of passthrough has the
// pod's connections tunnelled to the apiserver unseen (passthrough.go).
//
// # Single objects
//
// The owner of a single object follows from the namespace in the path, or from the
// object's uid (pipeline/stages/fence.go). Writes of objects of another shard are refused
// with 403; gets pass, unless reads are Own. The lock is exempt. Writes count until they can have no effect any
// more, and continue if their client leaves (inflight.go). A policy has settled when the
// writes of all earlier ones are over.
//
// # Rules
//
// Requests that pass all other stages are subject to rules: first to those that limit
// (proxy/limit), then to those that inject faults (proxy/fault). The results of requests
// that were sent, or that a fault answered, count in the rules that limit. The proxy's own
// refusals do not count.
//
// # Other hosts
//
// ServeEgress serves the pod's redirected connections to other hosts (egress.go, package
// egress), with accounts of their own from the same pools.
//
// # Webhooks
//
// Reviews serves the connections to the pod's own webhook (reviews.go, package review), also
// with accounts of their own.
//
// # Bounds
//
// Everything that a pod can make the proxy keep is bounded per pod. What is above a bound
// is refused; Accept never waits (transport/downstream, pipeline/budget.go). A bound with a second
// figure is also a bound of the node, of twice its size. Each pod has the second figure
// for itself. Above that it gets at most as much as it leaves for the others.
//
//	1024, 32       connections
//	32, 4          of them HTTP/2, with 512 streams each; others get HTTP/1.1
//	64, 4 MiB      memory of incomplete handshakes and heads, taken as 16 times the bytes
//	               that were sent
//	64, 2 MiB      memory of short requests in progress: 429 above it
//	184, 2 MiB     memory of watches and other long requests: 429 above it. The first
//	               figure is Config.WatchMemory
//	512 KiB        that only requests about the lock can use, before the 64 MiB
//	64, 4 MiB      memory to filter protobuf lists and large objects: 429 above it. It also
//	               keeps events that faults delay: above it they pass. Large buffers of
//	               watches are in it: above it they are small
//	1 MiB, 64 KiB  what arrives on one HTTP/2 connection of watches to the apiserver, and on
//	               one of its streams, before the client reads it
//	1024           watches whose faults withhold events, or withheld some at their end:
//	               no events of other watches are dropped
//	64             requests that are being answered with 429; others are cut
//	128 KiB        the head of one request: 431 above it. The apiserver allows 1 MiB
//	256 KiB        the head of one response, and 2048 lines of it: 502 above it
//	4, 8           handshakes computed at once, with the pod and with the apiserver
//	100/s          requests that the client cancels before the answer, 1000 at once
//	100/s          frames of an HTTP/2 connection that advance no request, 10,000 at once
//	64 KiB         what waits to be written to one HTTP/2 connection, and as much of replies to
//	               its frames
//	10 s           for a handshake or a head
//	45 to 60 s     in which a client reads nothing on a connection
//	60 s           in which a client does not read the last 64 KiB of an HTTP/2 stream
//
// The clients of a webhook may be any pods. So their connections have bounds apart from these,
// and memory is divided among clients, which are addresses:
//
//	512              connections of each IP family, 256 of one client
//	32, 4            of them HTTP/2, with 256 streams each; the second figure is for each pod
//	64 MiB, 128 KiB  memory of incomplete handshakes and heads of one client
//	32 MiB, 512 KiB  memory of one client's reviews in progress: 429 above it. The first 1 MiB
//	                 of a review is kept, and takes three times its size as it arrives
//	4                handshakes computed at once
//	40 s             in which a review arrives
//	3                pods of the owner that are tried, in a third of the webhook's timeout
//	64 KiB           the head of an answer
//
// A request is in its account until its response is written. Its weight is
// the memory that its head can take, before it is parsed: 128 bytes for each field
// besides its length, 384 for each part of the target. Of a watch that is open, 33 KiB are left:
// its head is dropped, and its buffers are in pools while no event comes. Filtered watches take
// 4 KiB more.
//
// # Draining
//
// Drain lets another proxy on the same listener take over without a failed request and
// without new lists (drain.go). Only if faults may drop events of watches, clients list
// once: the next proxy does not know what they missed. Connections that end are left to their
// clients to close: a client may send a request before it has read that the connection ends.
//
// # What never happens
//
// For a request to the apiserver, the proxy dials only the addresses of the Cluster, whatever
// the request says. It adds no credential. It sends no write twice. Before a policy came it passes
// nothing. A refusal is a metav1.Status that names ctrlmesh.
package proxy
