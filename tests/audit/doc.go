// Package audit finds requests that went around the mesh, and writes of shards that
// did not own what they wrote.
//
// The apiserver writes every request into its audit log, under an id that it also
// returns to the caller. An agent writes every request that it forwarded into its
// access log, under the same id. A request of a member that is in the first and
// not in the second reached the apiserver by another way: it leaked.
//
// The functions here are pure. They are given the logs as readers, and do not know
// where these come from. An access line may be written a moment after the audit
// event, so who sees a leak should read the access logs once more before believing
// it.
//
// What shards own is in the same log, as the bodies of the requests that wrote it
// into the status of their root. So writes and owners have one clock, the
// apiserver's.
package audit
