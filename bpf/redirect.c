//go:build ignore

// Turns a captured pod's connections to an apiserver towards the agent's
// listener in that pod's network namespace.
//
// The programs never ask whether the agent lives. Without an agent nobody
// listens and the connect is refused: better none than one around the proxy.

#include "uapi.h"

char __license[] SEC("license") = "Apache-2.0";

// An IPv4 address is kept mapped (::ffff:a.b.c.d), so that one map serves both families.
struct destination {
	__u32 address[4]; // network byte order
	__u16 port;       // host byte order
	__u16 zero;
};

struct pod {
	__u8 uid[16];
	__u16 port; // of the listener on 127.0.0.1 and ::1, host byte order
	__u16 zero;
};

// The captured pods, by the cookie of their network namespace. Cookies are never reused.
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
	__type(key, __u64);
	__type(value, struct pod);
} pods SEC(".maps");

// Where apiservers are reached: as Services and as endpoints.
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
	__type(key, struct destination);
	__type(value, __u8);
} destinations SEC(".maps");

// The agent's own sockets. Only who holds this map can enter one, by file
// descriptor: unlike a mark, an entry cannot be forged inside a pod.
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
	__type(key, int);
	__type(value, __u8);
} agent_sockets SEC(".maps");

enum verdict { REFUSE, PASS, REDIRECT };

// Decides about a connect to `to`; for REDIRECT, `port` is the one to turn it to.
static inline __attribute__((always_inline)) enum verdict
decide(struct bpf_sock_addr *ctx, const struct destination *to, __u16 *port)
{
	// MPTCP comes by as the TCP subflow it starts with, TCP fast open like any connect.
	if (ctx->type != SOCK_STREAM)
		return PASS;
	// Nearly all of a node's connections end here, one lookup dear.
	if (!bpf_map_lookup_elem(&destinations, to))
		return PASS;
	if (bpf_sk_storage_get(&agent_sockets, ctx->sk, 0, 0))
		return PASS;
	// The socket's namespace, not that of the thread that connects it.
	__u64 cookie = bpf_get_netns_cookie(ctx);
	const struct pod *pod = bpf_map_lookup_elem(&pods, &cookie);
	if (!pod)
		return PASS;
	// Bound to a device (SO_BINDTODEVICE) it could not reach lo, and must not go direct.
	if (ctx->sk->bound_dev_if)
		return REFUSE;
	*port = pod->port;
	return REDIRECT;
}

SEC("cgroup/connect4")
int connect4(struct bpf_sock_addr *ctx)
{
	struct destination to = {
		.address = {0, 0, bpf_htonl(0xffff), ctx->user_ip4},
		.port = bpf_ntohs(ctx->user_port),
	};
	__u16 port = 0;
	enum verdict verdict = decide(ctx, &to, &port);
	if (verdict == REDIRECT) {
		ctx->user_ip4 = bpf_htonl(0x7f000001);
		ctx->user_port = bpf_htons(port);
	}
	return verdict != REFUSE;
}

SEC("cgroup/connect6")
int connect6(struct bpf_sock_addr *ctx)
{
	struct destination to = {
		.address = {ctx->user_ip6[0], ctx->user_ip6[1], ctx->user_ip6[2], ctx->user_ip6[3]},
		.port = bpf_ntohs(ctx->user_port),
	};
	__u16 port = 0;
	enum verdict verdict = decide(ctx, &to, &port);
	if (verdict == REDIRECT) {
		// A v4-mapped connection stays one: ::ffff:127.0.0.1, else ::1.
		int mapped = !to.address[0] && !to.address[1] && to.address[2] == bpf_htonl(0xffff);
		ctx->user_ip6[0] = 0;
		ctx->user_ip6[1] = 0;
		ctx->user_ip6[2] = mapped ? bpf_htonl(0xffff) : 0;
		ctx->user_ip6[3] = mapped ? bpf_htonl(0x7f000001) : bpf_htonl(1);
		ctx->user_port = bpf_htons(port);
	}
	return verdict != REFUSE;
}
