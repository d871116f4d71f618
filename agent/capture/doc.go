// Package capture brings a pod's connections to the apiserver to the agent.
//
// The agent opens listeners inside the network namespace of each captured pod,
// on 127.0.0.1 and ::1, and connections to a listed destination are redirected
// to them: by BPF at the connect, or by iptables in the pod's namespace. So the
// listener a connection came in by is the pod's identity, and the connections
// that the agent makes for a pod (see [Pod.DialContext]) leave from the pod's
// own address, under the pod's own network policies. Where a node allows
// neither, a pod can be made to look for the apiserver at the agent's own
// address: then the address that it comes from is its identity.
//
// What a pod connects to elsewhere goes its own way, unless [Pod.SetEgress] names
// ports: then it comes in by listeners of its own, under the same rules.
//
// A captured pod stays captured. Listeners come before the redirection, an
// earlier agent's redirection stays until the new one replaces it at once, and
// without an agent the connections are refused, but for pods that fail open. An
// agent that is there when the next one comes hands its listeners over, so that
// nothing is refused in between. What a pod had connected before it was captured
// is ended.
//
// What the process needs: CAP_SYS_ADMIN to enter a network namespace (it
// includes CAP_BPF), CAP_NET_ADMIN to load and attach the programs, to mark
// and end sockets and for iptables (that of nftables), and read access to the paths
// that name the namespaces (for /proc/PID/ns/net of another user's process
// CAP_SYS_PTRACE). Package bpf says which kernels it needs; on earlier ones only
// iptables is possible.
package capture
