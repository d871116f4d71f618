package harness

import (
	"strconv"
	"time"
)

// Count is one count of a suite's result line.
type Count struct {
	Name    string
	Parts   []string // that take the count
	Value   string
	OK      bool
	Details []string // printed with the result, whichever parts ran
}

// Number returns a count of n. The named parts take it.
func Number(name string, n int, ok bool, parts ...string) Count {
	return Count{Name: name, Parts: parts, Value: strconv.Itoa(n), OK: ok}
}

// Exactly returns a count that must equal want.
func Exactly(name string, got, want int, parts ...string) Count {
	return Number(name, got, got == want, parts...)
}

// Milliseconds returns a count of whole milliseconds.
func Milliseconds(name string, d time.Duration, ok bool, parts ...string) Count {
	return Count{Name: name, Parts: parts, Value: strconv.FormatInt(d.Milliseconds(), 10), OK: ok}
}

// Text returns a count that is no plain number.
func Text(name, value string, ok bool, parts ...string) Count {
	return Count{Name: name, Parts: parts, Value: value, OK: ok}
}
