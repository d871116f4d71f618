package listen

// FieldWeight is the memory that a field of a head takes besides its bytes.
const FieldWeight = 128

// HeadWeight returns how many bytes of memory the fields of a head take, if their names
// and values are copied so many times.
func HeadWeight(fields map[string][]string, copies int) (n int64) {
	for name, values := range fields {
		for _, v := range values {
			n += FieldWeight + int64(copies*(len(name)+len(v)))
		}
	}
	return n
}

// NamesWeight returns how many bytes of memory two maps take that have the names of these fields, as those of a trailer
// that was announced.
func NamesWeight(fields map[string][]string) (n int64) {
	for name := range fields {
		n += FieldWeight + int64(2*len(name))
	}
	return n
}
