package shadow

import (
	"maps"
	"slices"
	"time"
)

// maxValues bounds the values that are remembered of a field. A counter may have had several since
// it was read last.
const maxValues = 16

// comparison compares one object, or the object of one path, with what a shadow wants of it.
type comparison struct {
	uid      string // of the object; empty: it is to be created
	deletion bool
	window   time.Duration
	wants    map[string]*want // by the path of the field
	differed bool
}

// want is what a shadow wants of a field that the object does not show yet.
type want struct {
	since  time.Time
	values []*value // the last ones that it has wanted; nil: the field is to be removed
}

// add adds what a write changes. An update says of each field what the shadow wants. Others leave
// open what they do not change.
func (c *comparison) add(change Change, update bool, at time.Time) {
	if c.wants == nil {
		c.wants = map[string]*want{}
	}
	if update {
		maps.DeleteFunc(c.wants, func(path string, _ *want) bool { _, ok := change[path]; return !ok })
	}
	for path, v := range change {
		w := c.wants[path]
		if w == nil {
			w = &want{since: at}
			c.wants[path] = w
		}
		w.values = slices.DeleteFunc(w.values, func(before *value) bool { return same(before, v) })
		if w.values = append(w.values, v); len(w.values) > maxValues {
			w.values = slices.Delete(w.values, 0, 1)
		}
	}
}

func same(v, w *value) bool { return v == w || v != nil && w != nil && *v == *w }

// see forgets what the object shows, and returns what it has not shown for a whole window. It is
// lost if others have deleted the object.
func (c *comparison) see(now *Object, at time.Time) (missing Change, lost bool) {
	if c.uid != "" && (now == nil || now.UID != c.uid) {
		if !c.deletion {
			return nil, true
		}
		now = nil
	}
	missing = Change{}
	for path, w := range c.wants {
		switch {
		case slices.ContainsFunc(w.values, func(v *value) bool { return now.shows(path, v, c.window) }):
		case at.Sub(w.since) >= c.window:
			missing[path] = w.values[len(w.values)-1]
			c.differed = true
		default:
			continue
		}
		delete(c.wants, path)
	}
	return missing, false
}

// due returns when the first field will have been wanted for a whole window.
func (c *comparison) due() (at time.Time) {
	for _, w := range c.wants {
		if end := w.since.Add(c.window); at.IsZero() || end.Before(at) {
			at = end
		}
	}
	return at
}

// size returns what the comparison takes in memory, in bytes.
func (c *comparison) size() (n int) {
	for path, w := range c.wants {
		n += len(path) + fieldSize*(1+len(w.values))
	}
	return n
}
