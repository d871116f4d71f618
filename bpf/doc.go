// Package bpf contains the BPF programs of the mesh and their loader. Nothing else
// in the project knows BPF.
//
// The programs run at every connect of the node (cgroup/connect4 and connect6 at the root
// of the unified cgroup hierarchy). They redirect a captured pod's connections to an
// apiserver to 127.0.0.1 or ::1 in the pod's own network namespace, where the agent
// listens. For pods with egress rules they also redirect connections to other hosts, at
// the configured ports, to a second listener, which can look up the original destination.
// Datagrams to those ports are refused (cgroup/sendmsg4 and sendmsg6 see unconnected
// sockets).
//
// Programs and maps are pinned, so the redirection outlives the agent. While no agent
// listens, connections are refused, except those of pods that may go direct then.
//
// Another program (sk_lookup) is attached to the network namespaces of pods whose inbound
// connections are steered: see [Inbound].
//
// The kernel must be 5.14 or later: the programs need cgroup links and netns cookies
// (5.7), and the agent reads the cookie of a namespace from a socket (5.14). Other
// features are optional (see [Redirect.Lacks]). The process needs CAP_BPF and
// CAP_NET_ADMIN, and a bpffs that it may write to.
//
// The bindings are committed. To generate them, install clang and llvm-strip and run:
//
//	go generate ./bpf
package bpf

//go:generate go tool bpf2go -go-package bpf -target bpfel -cc clang -cflags "-O2 -Wall -Werror" -output-stem redirect redirect redirect.c
//go:generate go tool bpf2go -go-package bpf -target bpfel -cc clang -cflags "-O2 -Wall -Werror" -output-stem lookup lookup lookup.c
