// Package layout computes the shards of a root configuration: their names, the pods of
// each, and the keys that each should own. It divides the key space by weight, so that the
// shards have equal load.
//
// It is pure.
package layout
