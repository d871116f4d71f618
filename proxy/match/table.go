package match

import (
	"encoding/binary"
	"slices"
	"sync"
)

// Table finds, among the matches of many rules, those that may match a request. It
// identifies them by their indexes. A request pays nothing for rules about other requests.
type Table struct {
	matches []*Resource

	mu    sync.Mutex
	known map[string]*Index // by the indexes of their matches
}

// maxIndexes bounds the Indexes that a table caches. How many there are depends on the
// rules of the policy alone.
const maxIndexes = 256

// NewTable returns the table of matches.
func NewTable(matches []*Resource) *Table {
	return &Table{matches: matches, known: map[string]*Index{}}
}

// OfKind returns the matches that may match requests of a kind, nil if there are none.
// Kinds with the same matches share an Index.
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

// Index is the matches of a table that may match requests of certain kinds. It finds them
// by name if they have names, else by namespace.
type Index struct {
	all               []int32
	names, namespaces map[string][]int32
	rest              []int32 // matches with neither names nor namespaces
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

// addTo adds the index n to the indexes of each value of the set.
func (s set) addTo(by map[string][]int32, n int32) {
	for _, v := range s {
		by[v] = append(by[v], n)
	}
}

// All returns the indexes of all matches, in order.
func (x *Index) All() []int32 { return x.all }

// Candidates iterates over the indexes of the matches that may match an object, in order.
type Candidates struct {
	from [3][]int32 // the first n are not empty
	n    int
}

// Of returns the matches that may match an object.
func (x *Index) Of(o *Object) (c Candidates) {
	if len(x.names) > 0 {
		c.add(x.names[o.Name])
	}
	if o.Lock { // matches only entries with names
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

// Next returns the next indexes, nil at the end.
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
