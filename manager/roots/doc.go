// Package roots derives shards from configurations with spec.root, and hands
// keys over between them. It is the I/O around manager/handover and manager/layout:
// a round gathers what happened, steps each root's state, writes the state
// (compared and swapped, in status.root), and only then lets the rest of the
// manager know of it.
//
// The leader alone runs rounds, one at a time.
package roots
