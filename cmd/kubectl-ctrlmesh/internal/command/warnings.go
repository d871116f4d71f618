package command

import "sync"

// maxWarnings bounds how many warnings are kept. Most commands show none.
const maxWarnings = 100

// warnings collects the warnings of the apiserver, which admission adds to its answers.
type warnings struct {
	mu    sync.Mutex
	texts []string
}

// HandleWarningHeader implements rest.WarningHandler.
func (w *warnings) HandleWarningHeader(code int, _ string, text string) {
	if code != 299 || text == "" { // the code of all warnings of Kubernetes
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.texts) < maxWarnings {
		w.texts = append(w.texts, text)
	}
}

// take returns the warnings since the last call.
func (w *warnings) take() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	out := w.texts
	w.texts = nil
	return out
}
