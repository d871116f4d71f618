package processors

const (
	// crowded is how many goroutines wait noticeably when there are too few processors.
	crowded = 0.5
	// full is the share of the processors that is in use when there are too few.
	full = 0.7
	// slack is the share of half of them that may be in use when half are enough.
	slack = 0.4
	// patience is how many intervals in a row there are too few processors before there are more.
	patience = 2
	// calm is how many intervals in a row half of them are enough before there are half as many.
	calm = 20
)

// load is what a process did within an interval, on average over its time.
type load struct {
	used    float64 // processors in use
	waiting float64 // goroutines that waited noticeably for one
}

// change is one of the number of processors.
type change int

const (
	none change = iota
	all
	half
)

// scale decides on changes, by the intervals since the last one. The zero value is ready to use.
type scale struct{ short, ample int }

// next returns what to do after an interval with a number of processors.
func (s *scale) next(processors int, l load) change {
	short := l.waiting > crowded || l.used > full*float64(processors)
	ample := !short && processors > 1 && l.used < slack*float64(processors/2)
	s.short, s.ample = inARow(s.short, short), inARow(s.ample, ample)
	switch {
	case s.short >= patience:
		*s = scale{}
		return all
	case s.ample >= calm:
		*s = scale{}
		return half
	}
	return none
}

func inARow(n int, again bool) int {
	if !again {
		return 0
	}
	return n + 1
}
