// The agent's heartbeat, which the programs of redirect.c and lookup.c share.

// How old the agent's last sign of life may be, in nanoseconds.
#define PATIENCE 2000000000LL

// When the agent last gave a sign of life (CLOCK_MONOTONIC, nanoseconds).
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
	__type(key, __u32);
	__type(value, __u64);
} heartbeat SEC(".maps");

#define inline static inline __attribute__((always_inline))

// Whether the agent has given a sign of life, which may be later than the time read here.
inline int is_alive(void)
{
	__u32 zero = 0;
	const volatile __u64 *last = bpf_map_lookup_elem(&heartbeat, &zero);
	return last && (__s64)(bpf_ktime_get_ns() - *last) <= PATIENCE;
}
