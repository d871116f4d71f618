// Package filter drops objects from the answers of the apiserver: items of lists and
// events of watches, in JSON, protobuf, Table and PartialObjectMetadata. It reads only the
// Key of each object and copies the bytes of those that it keeps. So a list of which
// everything is kept stays identical to the byte. A list of which some items are kept has
// the metadata of the whole list: its remainingItemCount counts the objects of all shards.
// BOOKMARK and ERROR events always pass.
//
// An object never passes that a client could read as another one. Input is an error if it
// could be read in two ways (a key that occurs twice) or cannot be decided (a row of a
// Table without its object). Encodings that the package does not know (CBOR, YAML) are
// refused.
//
// JSON and watches take the memory of their largest object. A protobuf list states its
// length before its items, so what is kept of it stays in memory until all of it was read.
package filter
