// Package trust holds the manager's three certificate authorities.
//
// The mesh CA signs the certificates with which agents stand in for the
// apiserver. Its certificate names, critically, the apiserver's names and the
// addresses that it has or had: whoever stole the key could impersonate the
// apiserver to labelled pods and nothing else to nobody. Pods read the CA when
// they start and keep it, so another one signs only when no pod is left that may
// not know it; see Ring.
//
// The egress CA signs the certificates with which agents stand in for other hosts,
// to the pods that opted in, so that rules see requests within TLS. Its certificate
// excludes, critically, what stands for the apiserver. It rotates as the mesh CA does.
//
// The serving CA signs what the manager itself serves: admission and the
// agents' stream. It rotates the same way, but waits for no pod: those who
// verify the manager read its bundle whenever it changes.
package trust
