package filter

import "strings"

// object is where in the input the key of an object is.
type object struct {
	kind, version, metadata, namespace, name, uid, revision, rows, columns span
}

// object walks over an object.
func (s *scanner) object() (o object) {
	s.members(func(key []byte) {
		switch string(key) {
		case "kind":
			s.stringOrNull(&o.kind)
		case "apiVersion":
			s.stringOrNull(&o.version)
		case "metadata":
			s.once(&o.metadata)
			if s.peek() == 'n' {
				s.null()
				return
			}
			s.members(func(key []byte) {
				switch string(key) {
				case "namespace":
					s.stringOrNull(&o.namespace)
				case "name":
					s.stringOrNull(&o.name)
				case "uid":
					s.stringOrNull(&o.uid)
				case "resourceVersion":
					s.stringOrNull(&o.revision)
				default:
					s.skip()
				}
			})
		case "rows":
			s.once(&o.rows)
			o.rows.from = s.i
			s.skip()
		case "columnDefinitions":
			s.once(&o.columns)
			s.peek()
			o.columns.from = s.i
			s.skip()
			o.columns.to = s.i
		default:
			s.skip()
		}
	})
	return o
}

// row walks over a row of a Table and returns its object. A row without metadata cannot
// be decided, and is an error.
func (s *scanner) row() (o object) {
	var seen span
	s.members(func(key []byte) {
		if string(key) != "object" {
			s.skip()
			return
		}
		s.once(&seen)
		o = s.object()
	})
	if !o.metadata.set {
		s.fail()
	}
	return o
}

// keyOf reads the key at the places that object found.
func (s *scanner) keyOf(o object) Key {
	return Key{Namespace: s.text(o.namespace), Name: s.text(o.name), UID: s.text(o.uid)}
}

// eachKey calls f with the key of the object, or with the keys of its rows if it is a
// Table. A Table without rows is an error.
func (s *scanner) eachKey(o object, f func(Key)) (table bool) {
	return s.each(o, func(o object) {
		if k := s.keyOf(o); s.err == nil {
			f(k)
		}
	})
}

// each is eachKey, but passes the objects instead of their keys.
func (s *scanner) each(o object, f func(object)) (table bool) {
	version, ok := strings.CutPrefix(string(s.text(o.version)), "meta.k8s.io/")
	table = ok && string(s.text(o.kind)) == "Table" && !strings.Contains(version, "/") // clients take two for no group
	if s.err != nil {
		return table
	}
	if !table {
		f(o)
		return table
	}
	if !o.rows.set {
		s.fail()
		return table
	}
	behind := s.i
	s.i = o.rows.from
	s.expect('[')
	for s.err == nil {
		if o := s.row(); s.err == nil {
			f(o)
		}
		if !s.another(']') {
			break
		}
	}
	s.i = behind
	return table
}
