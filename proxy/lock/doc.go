// Package lock gives every shard a leader-election lock of its own while the
// operator keeps using the name it knows.
//
// The lock L of shard S is L---S upstream. Names are exchanged on the way up in
// the path (by segment), the field selector (parsed) and the body; on the way
// down in objects, lists, tables, watch events and Status messages. Bodies are
// edited in place: the name is cut out and the other put in, every other byte
// stays, so fields this package has never heard of survive.
//
// A client that asks for the upstream name itself is served as if there were no
// mesh: it named what it meant, and nothing is suffixed twice.
//
// The package does no I/O of its own.
package lock
