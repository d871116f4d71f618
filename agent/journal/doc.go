// Package journal records where it outlives an agent whether writes of its pods may be
// in flight, so that the next agent confirms no policy too early.
//
// Each agent has a file in the node's run directory, mapped into its memory: to count
// a write is one atomic addition. The kernel keeps the pages when the process dies.
// The agent holds a lock on the file for as long as it lives, so others see its death
// without a protocol, however it dies.
//
// The deadlines are of CLOCK_BOOTTIME. A reboot of the node empties the run directory,
// or changes the boot ID: then nothing is known of what was in flight.
package journal
