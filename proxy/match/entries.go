package match

import meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"

// Entries are the entries of many rules. Once all are added, Table and Hosts find them by
// their indexes.
type Entries[R any] struct {
	Resources []Entry[*Resource, R]
	Paths     []Entry[*Path, R]
	URLs      []Entry[*URL, R]
	Table     *Table // of Resources
	Hosts     *Hosts // of URLs
}

// Entry is a compiled entry with its rule.
type Entry[M, R any] struct {
	Match M
	Rule  R
}

// Add compiles the entries of a rule.
func (e *Entries[R]) Add(rule R, resources []*meshv1.ResourceMatch, paths []*meshv1.PathMatch, urls []*meshv1.HttpMatch) error {
	for _, m := range resources {
		compiled, err := NewResource(m)
		if err != nil {
			return err
		}
		e.Resources = append(e.Resources, Entry[*Resource, R]{compiled, rule})
	}
	for _, m := range paths {
		e.Paths = append(e.Paths, Entry[*Path, R]{NewPath(m), rule})
	}
	for _, m := range urls {
		compiled, err := NewURL(m)
		if err != nil {
			return err
		}
		e.URLs = append(e.URLs, Entry[*URL, R]{compiled, rule})
	}
	return nil
}

// Index sets Table and Hosts. The order of the entries must not change afterwards.
func (e *Entries[R]) Index() {
	e.Table, e.Hosts = NewTable(matches(e.Resources)), NewHosts(matches(e.URLs))
}

func matches[M, R any](of []Entry[M, R]) (out []M) {
	for _, entry := range of {
		out = append(out, entry.Match)
	}
	return out
}
