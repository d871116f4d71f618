package status

// maxNote bounds an Event's note, which the apiserver takes up to 1 KiB of.
const maxNote = 1000

// Note returns a text as an Event's note.
func Note(s string) string { return bounded(s, maxNote) }
