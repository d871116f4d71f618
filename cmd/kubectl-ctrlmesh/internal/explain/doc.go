// Package explain says what the mesh does with a request that a pod would send now. It compiles the
// policy of the pod by the code of the manager, and asks the stages of the proxy, so that it says the same
// as they do. It is pure.
//
//	request.go   the request as the pod would send it
//	resource.go  resources by the names that users write
//	policy.go    the policy that follows from the objects in force
//	proxy.go     what the stages of the proxy decide
//	traffic.go   limits and faults
//	verdict.go   what the user reads
//	summary.go   the policy of a pod in sentences
//	writes.go    the writes of all pods of a root
//	rule.go      which rule decides, and what to do
package explain
