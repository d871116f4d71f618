package explore

import "slices"

var (
	// One shard gives to two, one of which had no keys.
	split = [][shards]uint8{{0b011, 0b100, 0}, {0b001, 0b010, 0b100}}
	// Every shard gives and takes.
	rotate = [][shards]uint8{{0b001, 0b010, 0b100}, {0b010, 0b100, 0b001}}
	// A shard gives to another one, or to a third.
	further = [][shards]uint8{{0b011, 0b100, 0}, {0b001, 0b110, 0}, {0b001, 0b100, 0b010}}
	// A shard gives to another one.
	pass = [][shards]uint8{{0b011, 0b100, 0}, {0b001, 0b110, 0}}
	// Shards are withdrawn, and come back.
	adopt = [][shards]uint8{{}, {0b011, 0b100, 0}}
	leave = [][shards]uint8{{0b011, 0b100, 0}, {}}
)

// Quick are worlds that are explored within seconds, the largest of them in part.
func Quick() []Options { return slices.Concat(Handovers(), Restores(), Adoptions()) }

// Handovers are worlds in which nothing is restored, and no pod is outside the mesh.
func Handovers() []Options {
	return []Options{
		{Members: [shards]int{1, 1, 1}, Wants: rotate, Changes: 1},
		{Members: [shards]int{1, 1, 0}, Wants: split, Changes: 1, Failures: 1},
		{Members: [shards]int{2, 1, 1}, Wants: rotate, Changes: 1},
	}
}

// Restores are worlds in which etcd is restored from a backup.
func Restores() []Options {
	return []Options{
		{Members: [shards]int{1, 1, 0}, Wants: split, Changes: 1, Failures: 1, Restores: 1},
		{Members: [shards]int{1, 1, 1}, Wants: further, Changes: 2, Restores: 1, Most: 60_000},
		Vanished()[0],
	}
}

// Vanished are worlds in which a pod vanishes before or after a restore.
func Vanished() []Options {
	return []Options{{Members: [shards]int{1, 1, 0}, Wants: pass, Changes: 1, Vanish: 1, Restores: 1, Most: 300_000}}
}

// Adoptions are worlds with pods outside the mesh, beside which shards are granted keys and
// are withdrawn.
func Adoptions() []Options {
	return []Options{
		{Members: [shards]int{1, 1, 0}, Wants: adopt, Changes: 2, Outside: true},
		{Members: [shards]int{1, 1, 0}, Wants: leave, Changes: 2, Restores: 1, Outside: true},
	}
}

// Long are more, and larger ones: some millions of states, in a minute or two.
func Long() []Options {
	return append(Quick(),
		Options{Members: [shards]int{1, 1, 1}, Wants: further, Changes: 2, Restores: 1},
		Options{Members: [shards]int{1, 1, 0}, Wants: pass, Changes: 1, Vanish: 1, Restores: 1, Most: 3_000_000},
		Options{Members: [shards]int{1, 1, 0}, Wants: split, Changes: 2, Failures: 1},
		Options{Members: [shards]int{2, 1, 0}, Wants: split, Changes: 1, Failures: 1},
		Options{Members: [shards]int{1, 1, 1}, Wants: split, Changes: 1, Failures: 1},
		Options{Members: [shards]int{1, 1, 0}, Wants: split, Changes: 1, Failures: 2, Most: 1_000_000},
		Options{Members: [shards]int{2, 1, 1}, Wants: split, Changes: 1, Failures: 1, Most: 1_000_000},
		Options{Members: [shards]int{1, 1, 1}, Wants: rotate, Changes: 1, Failures: 1, Most: 1_000_000},
	)
}
