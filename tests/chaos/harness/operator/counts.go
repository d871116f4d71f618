package operator

import "time"

// Counts are the counts of all operators of a run.
type Counts struct {
	Handovers    int
	Took         map[string][]time.Duration // how long handovers took, by part
	DoubleWrites int                        // writes of another shard's keys, and keys with two owners
	Lost         int                        // objects that no pod has reconciled in the end
	Orphans      int                        // namespaces without an owner in the end, or without a working one for too long
}

// addHandovers counts handovers of a part, by how long each took.
func (c *Counts) addHandovers(part string, took []time.Duration) {
	c.Handovers += len(took)
	c.Took[part] = append(c.Took[part], took...)
}
