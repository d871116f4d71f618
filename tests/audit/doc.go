// Package audit finds requests that bypassed the mesh, and writes by shards that did not own
// the object.
//
// The apiserver writes every request into its audit log, under an id that it also
// returns to the caller. An agent writes every request that it forwarded into its
// access log, under the same id. A request of a member that is in the first and
// not in the second reached the apiserver by another way: it leaked.
//
// The functions are pure: they read logs from readers. An access line may be written a
// moment after the audit event, so callers should read the access logs again before they
// report a leak.
//
// The audit log also has the scopes of shards, as the bodies of the requests that wrote
// the status of their root. So writes and owners have one clock, the apiserver's.
package audit
