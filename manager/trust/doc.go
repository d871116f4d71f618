// Package trust manages the three certificate authorities of the manager.
//
// The mesh CA signs the certificates with which agents stand in for the apiserver. A
// critical name constraint limits it to the current and former names and addresses of the
// apiserver. So a stolen key can only impersonate the apiserver, and only to labelled pods.
// Pods read the CA once, when they start. So a new CA signs only once every pod trusts it;
// see Ring.
//
// The egress CA signs the certificates with which agents stand in for other hosts, for pods
// that opted in, so that rules apply to requests within TLS. A critical name constraint
// excludes the names and addresses of the apiserver. It rotates in the same way as the mesh
// CA.
//
// The serving CA signs the certificates of the manager's own servers: admission and the
// agents' stream. It rotates in the same way, but waits for no pod, because its clients read
// the bundle whenever it changes.
package trust
