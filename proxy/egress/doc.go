// Package egress serves the connections of a pod to other hosts than the apiserver:
// it sees who is asked for what, lets rules decide, and passes on the rest.
//
// # What is seen
//
// The first bytes tell what a connection speaks (sniff.go). Of TLS the ClientHello
// shows the server's name and the protocols offered (hello.go); a name beside an
// encrypted ClientHello is not believed, whether that is real or made up. HTTP/1 and
// HTTP/2 without TLS are read request by request (http.go). What speaks something
// else, or nothing within three seconds, is not seen.
//
// A rule that asks for what is not seen is decided by refuse_unseen of its Breaker. Rules are
// about what the client says: who answers at an address is not asked, but where TLS is
// decrypted.
//
// # What goes where
//
// Everything goes to where the connection was meant to go, whatever Host, SNI or a
// request's target says; never to the apiserver, which has rules of its own. TLS is
// tunnelled as it is (tunnel.go), in the kernel where it can be. It is decrypted
// (decrypt.go) if a rule must see more and the pod trusts the egress CA: the server is
// then verified, and spoken to in the protocol that the client gets. What a request
// asks for must be what TLS was for: 421 else. Requests that net/http reads are written
// anew, so that no two servers see other limits of them; targets and bodies stay as
// they are. Of a target that servers could read in two ways, where rules are about
// paths: 400.
//
// A client may ask a proxy: then the host in the target counts, and of CONNECT also
// what shows within (connect.go). If that is tunnelled, a rule that limits or harms
// takes both as one: faults of an answer are done to what comes through. Requests
// that are seen within, a further CONNECT too, are no part of it.
//
// # In what order
//
// What intercept rules refuse is not counted by limits, and what these refuse meets no
// fault. Of a connection that is not seen into, this is so once, when it begins; another
// policy asks the intercept rules again about all that is under way, and the limits that
// are ForceOpened, and cuts it. Refused is by 403, 429 or 503 with a message in JSON, or
// in TLS by the alert access_denied.
package egress
