// Package filter drops objects from what the apiserver streams: items of lists and
// events of watches, in JSON, protobuf, Table and PartialObjectMetadata. It reads of
// each object only what decides (Key) and copies the bytes of those that stay, so a
// list of which all stays is the same to the byte, and one of which some stays has
// the metadata of the whole: its remainingItemCount is that of all owners.
// BOOKMARK and ERROR events always pass.
//
// An object never passes that a client would read as another's. What could be read
// in two ways (a key that occurs twice), or cannot be decided (a row of a Table
// without its object), is an error. What it knows no form of (CBOR, YAML), it refuses.
//
// JSON and watches take the memory of their largest object. A protobuf list says its
// length before its items, so what stays of one is held until all of it has come.
package filter
