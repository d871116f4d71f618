// Package lock gives every shard a leader-election lock of its own while the
// operator keeps using the name it knows.
//
// The lock L of shard S is L---S upstream. In requests, the name is swapped in the path (by
// segment), the field selector (parsed) and the body. In answers, it is swapped in objects,
// lists, tables, watch events and Status messages. Bodies are edited in place: only the
// bytes of the name change, so fields that this package does not know survive.
//
// A request for the upstream name itself passes as if there were no mesh: no suffix is added
// twice.
//
// The package does no I/O of its own.
package lock
