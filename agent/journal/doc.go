// Package journal records which pods may have writes in flight. The record survives the
// agent, so that the next one does not confirm a policy too early.
//
// Each agent has a file in the node's run directory that is mapped into its memory: counting
// a write is one atomic addition. The kernel keeps the pages when the process dies. The
// agent locks the file while it runs, so others notice its end without a protocol.
//
// Deadlines are times of CLOCK_BOOTTIME. After a reboot the run directory is empty, or the
// boot ID has changed: then nothing is known of the writes before.
package journal
