package explore

var (
	// One shard gives to two, one of which had no keys.
	split = [][shards]uint8{{0b011, 0b100, 0}, {0b001, 0b010, 0b100}}
	// Every shard gives and takes.
	rotate = [][shards]uint8{{0b001, 0b010, 0b100}, {0b010, 0b100, 0b001}}
)

// Quick are worlds that are explored wholly within seconds.
func Quick() []Options {
	return []Options{
		{Members: [shards]int{1, 1, 1}, Wants: rotate, Changes: 1},
		{Members: [shards]int{1, 1, 0}, Wants: split, Changes: 1, Failures: 1},
		{Members: [shards]int{2, 1, 1}, Wants: rotate, Changes: 1},
	}
}

// Long are more, and larger ones: some millions of states, in a minute or two.
func Long() []Options {
	return append(Quick(),
		Options{Members: [shards]int{1, 1, 0}, Wants: split, Changes: 2, Failures: 1},
		Options{Members: [shards]int{2, 1, 0}, Wants: split, Changes: 1, Failures: 1},
		Options{Members: [shards]int{1, 1, 1}, Wants: split, Changes: 1, Failures: 1},
		Options{Members: [shards]int{1, 1, 0}, Wants: split, Changes: 1, Failures: 2, Most: 1_000_000},
		Options{Members: [shards]int{2, 1, 1}, Wants: split, Changes: 1, Failures: 1, Most: 1_000_000},
		Options{Members: [shards]int{1, 1, 1}, Wants: rotate, Changes: 1, Failures: 1, Most: 1_000_000},
	)
}
