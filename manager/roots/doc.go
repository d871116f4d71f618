// Package roots derives shards from configurations with spec.root, and moves keys between
// them by handovers. It does the I/O for manager/handover and manager/layout. A round
// collects events, steps the state of each root and writes it to status.root by compare and
// swap. Only then does the rest of the manager see the new state.
//
// Only the leader runs rounds, one at a time.
package roots
