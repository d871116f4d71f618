// Package isolation decides, by a policy alone, what of a shard's requests concerns other
// shards: which objects lists and watches leave out, which writes and gets are refused, and
// what every shard may read or write. It does no I/O.
package isolation
