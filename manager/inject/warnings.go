package inject

import (
	"fmt"

	"github.com/ctrlmesh/ctrlmesh/manager/internal/text"
)

const (
	// maxWarnings is how many warnings of one kind a review is answered with.
	maxWarnings = 16
	// maxQuoted bounds what a warning quotes of a pod, in bytes. Names are not validated yet.
	maxQuoted = 512
)

// warnings collects warnings for the author of a pod: few of them, because a pod may have many
// containers with a long name.
type warnings struct {
	texts []string
	more  int
}

func (w *warnings) add(format string, args ...any) {
	if len(w.texts) == maxWarnings {
		w.more++
		return
	}
	for i, arg := range args {
		if s, ok := arg.(string); ok {
			args[i] = text.Bounded(s, maxQuoted)
		}
	}
	w.texts = append(w.texts, fmt.Sprintf(format, args...))
}

// list returns the warnings, and how many more there are.
func (w *warnings) list() []string {
	if w.more == 0 {
		return w.texts
	}
	return append(w.texts, fmt.Sprintf("and %d more", w.more))
}
