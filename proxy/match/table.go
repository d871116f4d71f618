package match

import (
	"encoding/binary"
	"slices"
	"sync"
)

// Table is of the matches of many rules, which are told by their numbers. It finds those
// that may be about a request, so that one pays nothing for rules about others.
type Table struct {
	matches []*Resource

	mu    sync.Mutex
	known map[string]*Index // by the numbers that they are of
}

// maxIndexes bounds those that a table remembers. Only the rules of a policy make more.
const maxIndexes = 256

// NewTable is of matches that are numbered as they come.
func NewTable(matches []*Resource) *Table {
	return &Table{matches: matches, known: map[string]*Index{}}
}

// OfKind are those that may be about requests of a kind; nil if there is none. Kinds with
// the same ones have them together.
func (t *Table) OfKind(k Kind) *Index {
	var of []int32
	var key []byte
	for i, m := range t.matches {
		if m.Of(k) {
			of = append(of, int32(i))
			key = binary.AppendUvarint(key, uint64(i))
		}
	}
	if of == nil {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	x := t.known[string(key)]
	if x == nil {
		x = t.index(of)
		if len(t.known) < maxIndexes {
			t.known[string(key)] = x
		}
	}
	return x
}

// Index is of those of a table's matches that may be about requests of some kinds: by name
// if they ask for names, else by namespace.
type Index struct {
	all               []int32
	names, namespaces map[string][]int32
	rest              []int32 // that ask for neither
}

func (t *Table) index(of []int32) *Index {
	x := &Index{all: of, names: map[string][]int32{}, namespaces: map[string][]int32{}}
	for _, n := range of {
		switch m := t.matches[n]; {
		case !m.names.all():
			m.names.addTo(x.names, n)
		case !m.namespaces.all():
			m.namespaces.addTo(x.namespaces, n)
		default:
			x.rest = append(x.rest, n)
		}
	}
	return x
}

// addTo adds a number to those of each value, once.
func (s *set) addTo(by map[string][]int32, n int32) {
	add := func(v string) {
		if of := by[v]; len(of) == 0 || of[len(of)-1] != n {
			by[v] = append(of, n)
		}
	}
	for _, v := range s.few {
		add(v)
	}
	for v := range s.many {
		add(v)
	}
}

// All are the numbers of all, in order.
func (x *Index) All() []int32 { return x.all }

// Candidates are the numbers of matches that may be about an object, in order.
type Candidates struct {
	from [3][]int32 // none is empty
	n    int
}

// Of returns those that may be about an object.
func (x *Index) Of(o *Object) (c Candidates) {
	if len(x.names) > 0 {
		c.add(x.names[o.Name])
	}
	if o.Lock { // which must be named
		return c
	}
	if len(x.namespaces) > 0 {
		c.add(x.namespaces[o.Namespace])
	}
	c.add(x.rest)
	return c
}

func (c *Candidates) add(of []int32) {
	if len(of) > 0 {
		c.from[c.n] = of
		c.n++
	}
}

// Next are the next of them; none at the end.
func (c *Candidates) Next() (numbers []int32) {
	if c.n == 0 {
		return nil
	}
	in := 0
	for i := 1; i < c.n; i++ {
		if c.from[i][0] < c.from[in][0] {
			in = i
		}
	}
	end := len(c.from[in])
	for i := range c.n {
		if i != in {
			before, _ := slices.BinarySearch(c.from[in][:end], c.from[i][0])
			end = before
		}
	}
	numbers = c.from[in][:end]
	if c.from[in] = c.from[in][end:]; len(c.from[in]) == 0 {
		c.n--
		c.from[in] = c.from[c.n]
	}
	return numbers
}
