// Package filter drops objects from what the apiserver streams: items of lists and
// events of watches, in JSON, protobuf, Table and PartialObjectMetadata. It reads of
// each object only what decides (Key) and copies the bytes of those that stay.
// What it knows no form of, it refuses.
package filter
