package node

import (
	"fmt"
	"log/slog"

	"github.com/ctrlmesh/ctrlmesh/agent/journal"
	"github.com/ctrlmesh/ctrlmesh/agent/telemetry"
)

// OpenJournal creates the journal of this agent in dir. Without room for a file, the agent
// serves all the same: it knows its own writes, and only the next agent waits for all pods.
func OpenJournal(dir string, events *telemetry.Recorder, logger *slog.Logger) *journal.Journal {
	j, err := journal.Create(dir)
	if err != nil {
		logger.Error("failed to create the journal: after this agent, handovers wait for all pods of the node", "error", err)
		events.Node("JournalUnavailable", fmt.Sprintf("after the next restart of the agent, handovers wait for all pods of this node: %v", err))
		return journal.InMemory(dir)
	}
	return j
}
