// Package bpf holds the BPF programs of the mesh and their loader. Nothing else
// in the project knows BPF.
//
// The programs run at every connect of the node (cgroup/connect4 and connect6
// at the root of the unified cgroup hierarchy). They turn a captured pod's
// connections to an apiserver towards 127.0.0.1 or ::1 in the pod's own network
// namespace, where the agent listens; and, of pods that are told to (egress), those to
// some ports of all others to a second listener, which learns where they were meant to
// go. What goes to those ports by UDP is refused (cgroup/sendmsg4 and sendmsg6 see
// what is not connected). They are pinned, so that the redirection
// outlives the agent: while no agent listens, the connections are refused, but
// for the pods that may go direct then.
//
// The kernel must be 5.14 or later: the programs need cgroup links and netns cookies
// (5.7), and whoever names a namespace to them reads its cookie from a socket (5.14). What
// else it lacks is done without (see [Redirect.Lacks]). The process needs CAP_BPF and
// CAP_NET_ADMIN, and a bpffs it may write to.
//
// The bindings are committed. Making them again takes clang and llvm-strip:
//
//	go generate ./bpf
package bpf

//go:generate go tool bpf2go -go-package bpf -target bpfel -cc clang -cflags "-O2 -Wall -Werror" -output-stem redirect redirect redirect.c
