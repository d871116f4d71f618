//go:build ignore

// Redirects a captured pod's connections to an apiserver, and those to configured
// ports, to the agent's listeners in the pod's network namespace.
//
// For most pods the programs never check whether the agent runs. Without an agent
// there is no listener, and the connect is refused rather than made around the
// proxy. Only the connections of pods that are OPEN go direct then.

#include "uapi.h"
#include "heartbeat.h"

char __license[] SEC("license") = "Apache-2.0";

// What this kernel supports; set before the programs are loaded.
const volatile _Bool can_look_up = 1; // sockets
const volatile _Bool can_see_cgroups = 1;
const volatile _Bool can_show_peer = 1;

// How deep below the root of the hierarchy pods' cgroups are searched.
#define LEVELS 10

// An IPv4 address is kept mapped (::ffff:a.b.c.d), so that one map serves both families.
struct destination {
	__u32 address[4]; // network byte order
	__u16 port;       // host byte order
	__u16 zero;
};

enum flags {
	OPEN = 1,    // connections go direct while no agent serves them
	HOST = 2,    // the node's namespace: the cgroup identifies the pod
	STALLED = 4, // the agent listens, but accepts no connections
};

struct pod {
	__u8 uid[16];
	__u16 port; // of the listener on 127.0.0.1 and ::1, host byte order
	__u16 flags;
	__u16 egress; // the same for other hosts; 0 if those are not redirected
	__u16 zero;
};

// A port, at any address, to which a pod's connections are redirected.
struct egress_port {
	__u8 uid[16];
	__u16 port; // host byte order
	__u16 zero;
};

// An address of the pod itself. Only an apiserver's connections are redirected there.
struct own_address {
	__u8 uid[16];
	__u32 address[4]; // network byte order
};

// The original destination of a redirected socket, and the port it was redirected to.
struct turned {
	struct destination from;
	__u16 to; // host byte order
	__u16 egress; // whether the listener looks up the destination
	__u64 netns;
};

// The client's end of a redirected connection, as the listener sees it.
struct origin {
	__u64 netns;
	__u32 address[4]; // network byte order
	__u16 port;	  // host byte order
	__u16 to;	  // the listener's, host byte order
	__u32 zero;
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

// The captured pods that share the node's network namespace, by the id of their cgroup.
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
	__type(key, __u64);
	__type(value, struct pod);
} cgroups SEC(".maps");

// The addresses of the apiservers: those of Services and of endpoints.
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
	__type(key, struct destination);
	__type(value, __u8);
} destinations SEC(".maps");

// Ports with equal low bits share a slot.
#define SLOTS 4096

// Whether any pod's connections to one of a slot's ports may be redirected. It avoids a
// second hash lookup for all other ports: an array lookup is one load.
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, SLOTS);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
	__type(key, __u32);
	__type(value, __u8);
} egress_slots SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
	__type(key, struct egress_port);
	__type(value, __u8);
} egress_ports SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
	__type(key, struct own_address);
	__type(value, __u8);
} own_addresses SEC(".maps");

// The original destinations of redirected connections. The agent takes an entry when it
// accepts the connection; entries of connections never accepted are evicted.
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
	__type(key, struct origin);
	__type(value, struct destination);
} origins SEC(".maps");

// The agent's own sockets. Adding one requires this map and the socket's file
// descriptor: unlike a mark, an entry cannot be forged inside a pod.
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
	__type(key, int);
	__type(value, __u8);
} agent_sockets SEC(".maps");

// The sockets that were redirected.
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
	__type(key, int);
	__type(value, struct turned);
} turned_sockets SEC(".maps");

inline int is_mapped(const __u32 address[4])
{
	return !address[0] && !address[1] && address[2] == bpf_htonl(0xffff);
}

// The pod of the connecting process, by its cgroup or an ancestor of that.
inline const struct pod *pod_of_task(void)
{
	__u64 id;
	if (!can_see_cgroups)
		return 0;
#pragma unroll
	for (int level = 1; level <= LEVELS; level++) {
		id = bpf_get_current_ancestor_cgroup_id(level);
		if (!id)
			return 0;
		const struct pod *pod = bpf_map_lookup_elem(&cgroups, &id);
		if (pod)
			return pod;
	}
	id = bpf_get_current_cgroup_id();
	return bpf_map_lookup_elem(&cgroups, &id);
}

// Whether there is a listener at the port to which a connection to `to` is redirected.
inline int is_listening(struct bpf_sock_addr *ctx, const struct destination *to, __u16 port)
{
	struct bpf_sock_tuple local = {};
	struct bpf_sock *listener;
	if (!can_look_up)
		return 1;
	if (is_mapped(to->address)) {
		local.ipv4.saddr = local.ipv4.daddr = bpf_htonl(0x7f000001);
		local.ipv4.dport = bpf_htons(port);
		listener = bpf_sk_lookup_tcp(ctx, &local, sizeof(local.ipv4), BPF_F_CURRENT_NETNS, 0);
	} else {
		local.ipv6.saddr[3] = local.ipv6.daddr[3] = bpf_htonl(1);
		local.ipv6.dport = bpf_htons(port);
		listener = bpf_sk_lookup_tcp(ctx, &local, sizeof(local.ipv6), BPF_F_CURRENT_NETNS, 0);
	}
	if (!listener)
		return 0;
	int listening = listener->state == BPF_TCP_LISTEN;
	bpf_sk_release(listener);
	return listening;
}

inline int is_loopback(const __u32 address[4])
{
	if (is_mapped(address))
		return (address[3] & bpf_htonl(0xff000000)) == bpf_htonl(0x7f000000) || !address[3];
	return !address[0] && !address[1] && !address[2] && (address[3] == bpf_htonl(1) || !address[3]);
}

// Whether connections of any pod to this port may be redirected.
inline int is_egress(__u16 port)
{
	__u32 slot = port % SLOTS;
	const __u8 *used = bpf_map_lookup_elem(&egress_slots, &slot);
	return used && *used;
}

// Whether this pod's connections to `to`, which is no apiserver, are redirected.
inline int is_egress_of(const struct pod *pod, const struct destination *to)
{
	if (!pod->egress || is_loopback(to->address))
		return 0;
	struct egress_port port = {.port = to->port};
	__builtin_memcpy(port.uid, pod->uid, sizeof(port.uid));
	if (!bpf_map_lookup_elem(&egress_ports, &port))
		return 0;
	struct own_address own = {
		.address = {to->address[0], to->address[1], to->address[2], to->address[3]},
	};
	__builtin_memcpy(own.uid, pod->uid, sizeof(own.uid));
	return !bpf_map_lookup_elem(&own_addresses, &own);
}

enum verdict { REFUSE, PASS, REDIRECT };

// Decides about a connect or a datagram to `to`; for REDIRECT, `port` is set to the
// listener's. A datagram is never redirected. It is refused where a connection would be
// redirected, because clients of HTTP/3 fall back to HTTP/2.
inline enum verdict decide(struct bpf_sock_addr *ctx, const struct destination *to, __u16 *port)
{
	// MPTCP arrives here as its first TCP subflow, TCP fast open like any connect.
	int stream = ctx->type == SOCK_STREAM;
	if (!stream && ctx->type != SOCK_DGRAM)
		return PASS;
	// Nearly all connections of a node return here, after one lookup.
	int listed = stream && bpf_map_lookup_elem(&destinations, to);
	if (!listed && !is_egress(to->port))
		return PASS;
	if (bpf_sk_storage_get(&agent_sockets, ctx->sk, 0, 0))
		return PASS;
	// The socket's namespace, not that of the thread that connects it.
	__u64 cookie = bpf_get_netns_cookie(ctx);
	const struct pod *pod = bpf_map_lookup_elem(&pods, &cookie);
	if (!pod)
		return PASS;
	if (pod->flags & HOST) {
		pod = pod_of_task();
		if (!pod)
			return PASS;
	}
	if (!listed && !is_egress_of(pod, to))
		return PASS;
	__u16 to_port = listed ? pod->port : pod->egress;
	__u16 flags = pod->flags;
	if (flags & OPEN && (flags & STALLED || !is_alive() || !is_listening(ctx, to, to_port)))
		return PASS;
	// Bound to a device (SO_BINDTODEVICE), it cannot reach lo, and must not go direct.
	if (ctx->sk->bound_dev_if)
		return REFUSE;
	if (!stream)
		return REFUSE;
	if (can_show_peer || !listed) {
		struct turned turned = {.from = *to, .to = to_port, .egress = !listed, .netns = cookie};
		struct turned *kept = bpf_sk_storage_get(&turned_sockets, ctx->sk, &turned, BPF_SK_STORAGE_GET_F_CREATE);
		if (kept)
			*kept = turned; // it may have been there, from an earlier connect
	}
	*port = to_port;
	return REDIRECT;
}

inline struct destination destination4(struct bpf_sock_addr *ctx)
{
	struct destination to = {
		.address = {0, 0, bpf_htonl(0xffff), ctx->user_ip4},
		.port = bpf_ntohs(ctx->user_port),
	};
	return to;
}

inline struct destination destination6(struct bpf_sock_addr *ctx)
{
	struct destination to = {
		.address = {ctx->user_ip6[0], ctx->user_ip6[1], ctx->user_ip6[2], ctx->user_ip6[3]},
		.port = bpf_ntohs(ctx->user_port),
	};
	return to;
}

SEC("cgroup/connect4")
int connect4(struct bpf_sock_addr *ctx)
{
	struct destination to = destination4(ctx);
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
	struct destination to = destination6(ctx);
	__u16 port = 0;
	enum verdict verdict = decide(ctx, &to, &port);
	if (verdict == REDIRECT) {
		// A v4-mapped connection stays one: ::ffff:127.0.0.1, else ::1.
		int mapped = is_mapped(to.address);
		ctx->user_ip6[0] = 0;
		ctx->user_ip6[1] = 0;
		ctx->user_ip6[2] = mapped ? bpf_htonl(0xffff) : 0;
		ctx->user_ip6[3] = mapped ? bpf_htonl(0x7f000001) : bpf_htonl(1);
		ctx->user_port = bpf_htons(port);
	}
	return verdict != REFUSE;
}

// Datagrams of sockets that are not connected.

SEC("cgroup/sendmsg4")
int sendmsg4(struct bpf_sock_addr *ctx)
{
	struct destination to = destination4(ctx);
	__u16 port = 0;
	return decide(ctx, &to, &port) != REFUSE;
}

SEC("cgroup/sendmsg6")
int sendmsg6(struct bpf_sock_addr *ctx)
{
	struct destination to = destination6(ctx);
	__u16 port = 0;
	return decide(ctx, &to, &port) != REFUSE;
}

// Runs before a connection's first packet, when its source address is known.
SEC("sockops")
int set_out(struct bpf_sock_ops *ctx)
{
	if (ctx->op != BPF_SOCK_OPS_TCP_CONNECT_CB)
		return 1;
	struct bpf_sock *sk = ctx->sk;
	if (!sk)
		return 1;
	struct turned *turned = bpf_sk_storage_get(&turned_sockets, sk, 0, 0);
	if (!turned || !turned->egress || bpf_ntohl(ctx->remote_port) != turned->to)
		return 1;
	struct origin origin = {.netns = turned->netns, .port = ctx->local_port, .to = turned->to};
	// The verifier wants each field read at its own fixed offset.
	volatile struct bpf_sock_ops *fixed = ctx;
	__u32 v4 = fixed->local_ip4;
	__u32 v6[4] = {fixed->local_ip6[0], fixed->local_ip6[1], fixed->local_ip6[2], fixed->local_ip6[3]};
	int is4 = fixed->family == AF_INET;
	origin.address[0] = is4 ? 0 : v6[0];
	origin.address[1] = is4 ? 0 : v6[1];
	origin.address[2] = is4 ? bpf_htonl(0xffff) : v6[2];
	origin.address[3] = is4 ? v4 : v6[3];
	bpf_map_update_elem(&origins, &origin, &turned->from, BPF_ANY);
	return 1;
}

// The original destination of a socket, if its peer is the listener.
inline const struct destination *dialled(struct bpf_sock_addr *ctx)
{
	const struct turned *turned = bpf_sk_storage_get(&turned_sockets, ctx->sk, 0, 0);
	if (!turned || ctx->user_port != bpf_htons(turned->to))
		return 0;
	return &turned->from;
}

SEC("cgroup/getpeername4")
int getpeername4(struct bpf_sock_addr *ctx)
{
	const struct destination *to = dialled(ctx);
	if (to && ctx->user_ip4 == bpf_htonl(0x7f000001)) {
		ctx->user_ip4 = to->address[3];
		ctx->user_port = bpf_htons(to->port);
	}
	return 1;
}

SEC("cgroup/getpeername6")
int getpeername6(struct bpf_sock_addr *ctx)
{
	const struct destination *to = dialled(ctx);
	if (!to)
		return 1;
	__u32 peer[4] = {ctx->user_ip6[0], ctx->user_ip6[1], ctx->user_ip6[2], ctx->user_ip6[3]};
	if (peer[3] == bpf_htonl(is_mapped(peer) ? 0x7f000001 : 1)) {
		ctx->user_ip6[0] = to->address[0];
		ctx->user_ip6[1] = to->address[1];
		ctx->user_ip6[2] = to->address[2];
		ctx->user_ip6[3] = to->address[3];
		ctx->user_port = bpf_htons(to->port);
	}
	return 1;
}
