// Package locks holds operators' leader-election locks for the mesh.
//
// A pod outside the mesh leads under the operator's own lock, and each shard under one of
// its own. So the mesh holds the operator's lock while any shard may act: then no pod
// outside the mesh can lead beside a shard. The mesh acquires the lock by the ordinary
// protocol, which pods outside the mesh follow as well: only when the record is empty, or
// has not changed for its own lease duration, and with compare-and-swap.
//
// The record itself is the only state. Its label makes an admission policy reject writes
// by anybody but the manager, so that the lock stays held while no manager runs.
package locks
