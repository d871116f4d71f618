// Package pipeline has one request as values: how it came, what is sent instead, and how
// it ends. It knows no connection, no policy and no pod.
//
//	request.go   Request: as its client sent it, never edited; Outgoing: what stages edit
//	classify.go  what a request asks for, by its path, as the apiserver reads it
//	clusters.go  the member cluster that a path leads to
//	state.go     State: a request, and what the stages have decided about it
//	stage.go     Stage: one decision; Plan: the stages of a verb and resource; Outcome: how
//	             a stage ends a request
//	budget.go    the memory that the requests of a pod may take
//	rules.go     what limits and faults have to do with a request
//	lists.go     what is remembered of a list or watch
//
// Package stages has the stages, and the policy that resolves them.
package pipeline
