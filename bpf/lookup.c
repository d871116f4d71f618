//go:build ignore

// Steers connections from outside a pod to ports of the pod to the agent's listeners in
// the pod's network namespace. The original destination stays the local address.
//
// The program is attached to the network namespace of each such pod, with a map of its
// own. It only ever selects a socket: without one the kernel looks for the application's,
// as it does without the program. So a connection reaches the application directly while
// the agent has no listener, or gives no sign of life.

#include "uapi.h"
#include "heartbeat.h"

char __license[] SEC("license") = "Apache-2.0";

struct inbound {
	__u16 port; // host byte order
	__u16 family;
};

// The agent's listeners, by the ports that are steered. The key with port 0 names the agent
// that has the pod; no connection is steered by it. The kernel removes closed sockets.
struct {
	__uint(type, BPF_MAP_TYPE_SOCKHASH);
	__uint(max_entries, 64);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
	__type(key, struct inbound);
	__type(value, __u64);
} listeners SEC(".maps");

// Whether the client is in the pod: its connections reach the application, and so do those
// that the agent makes for the pod.
inline int is_local(const volatile struct bpf_sk_lookup *ctx)
{
	if (ctx->family == AF_INET) {
		__u32 remote = ctx->remote_ip4;
		return (remote & bpf_htonl(0xff000000)) == bpf_htonl(0x7f000000) || remote == ctx->local_ip4;
	}
	// The verifier wants each field read at its own fixed offset.
	__u32 a = ctx->remote_ip6[0], b = ctx->remote_ip6[1], c = ctx->remote_ip6[2], d = ctx->remote_ip6[3];
	if (!a && !b && !c && d == bpf_htonl(1))
		return 1;
	return a == ctx->local_ip6[0] && b == ctx->local_ip6[1] && c == ctx->local_ip6[2] && d == ctx->local_ip6[3];
}

SEC("sk_lookup")
int steer(struct bpf_sk_lookup *ctx)
{
	struct inbound to = {.port = ctx->local_port, .family = ctx->family};
	if (ctx->protocol != IPPROTO_TCP || !to.port || is_local(ctx) || !is_alive())
		return SK_PASS;
	struct bpf_sock *listener = bpf_map_lookup_elem(&listeners, &to);
	if (!listener)
		return SK_PASS;
	bpf_sk_assign(ctx, listener, 0); // if it fails, the kernel goes on looking
	bpf_sk_release(listener);
	return SK_PASS;
}
