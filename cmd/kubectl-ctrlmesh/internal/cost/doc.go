// Package cost says what operators on the mesh cost the apiserver: how much they request, by what agents have
// counted between two readings of their metrics. It is pure.
//
//	reading.go  what the metrics of agents say at one time
//	cost.go     the difference of two readings, by shard and by resource
package cost
