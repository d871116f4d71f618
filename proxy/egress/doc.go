// Package egress serves the connections of a pod to hosts other than the apiserver.
// It finds out which host a connection or request is for, applies the rules, and
// forwards what they allow.
//
// # What the proxy sees
//
// The first bytes show which protocol a connection speaks (sniff.go). The ClientHello
// of TLS contains the server name and the offered protocols (hello.go). If it has an
// encrypted ClientHello, real or GREASE, the server name is ignored. HTTP/1 and HTTP/2
// without TLS are read request by request (http.go). A connection that speaks another
// protocol, or sends nothing within three seconds, is opaque: nothing of it is seen.
//
// If a rule needs something that is not seen, refuse_unseen of its Breaker decides.
// Rules match what the client says. The identity of the server is verified only where
// TLS is decrypted.
//
// # Where connections go
//
// Everything goes to the original destination of the connection, whatever Host, SNI or
// the target of a request says. Nothing goes to the apiserver, which has rules of its
// own. TLS is tunnelled unchanged (tunnel.go), in the kernel where possible. It is
// decrypted (decrypt.go) if a rule must see more and the pod trusts the egress CA. The
// proxy then verifies the server, and speaks the same protocol to it as to the client.
// The host of a request must be the host of the TLS connection, else the answer is 421.
// Requests that net/http reads are serialised again, so that all servers see the same
// boundaries between them; targets and bodies stay unchanged. If rules are about paths,
// a target that servers could read in two ways gets 400.
//
// A client may use a forward proxy. Then the host in the target counts, and for CONNECT
// also what is seen within the tunnel (connect.go). If the tunnel is opaque, a rule that
// limits or injects faults counts the CONNECT and its tunnel as one, and the faults of
// an answer apply to the bytes that come through the tunnel. Requests that are seen
// within the tunnel, further CONNECTs included, are counted on their own.
//
// # Order of rules
//
// Limits do not count what intercept rules refuse, and no fault is injected into what
// limits refuse. An opaque connection is checked once, when it begins. When the policy
// changes, the intercept rules and the limits that are ForceOpened are applied again to
// everything under way, and what they refuse is cut. A refusal is a 403, 429 or 503 with
// a message in JSON, or in TLS the alert access_denied.
package egress
