package limit

import "time"

// parts is the number of parts of a window. The window slides by one part.
const parts = 10

// window counts the outcomes of a sliding time window.
type window struct {
	part   time.Duration // above 0
	begin  time.Time     // of the newest part; zero: nothing counted yet
	counts [parts]counts // the newest first
}

type counts struct {
	Ended  uint64 `json:"e,omitempty"`
	Failed uint64 `json:"f,omitempty"`
	Timed  uint64 `json:"t,omitempty"` // requests whose duration counts
	Slow   uint64 `json:"s,omitempty"`
}

func newWindow(length time.Duration) window { return window{part: max(length/parts, 1)} }

func (w *window) advance(now time.Time) {
	switch by := now.Sub(w.begin) / w.part; {
	case w.begin.IsZero(), by >= parts:
		w.begin, w.counts = now, [parts]counts{}
	case by > 0:
		copy(w.counts[by:], w.counts[:])
		clear(w.counts[:by])
		w.begin = w.begin.Add(by * w.part)
	}
}

func (w *window) add(now time.Time, c counts) (sum counts) {
	w.advance(now)
	w.counts[0] = w.counts[0].plus(c)
	return w.sum(now)
}

func (w *window) sum(now time.Time) (sum counts) {
	if w.begin.IsZero() {
		return sum
	}
	w.advance(now)
	for _, part := range w.counts {
		sum = sum.plus(part)
	}
	return sum
}

func (w *window) reset() { w.begin, w.counts = time.Time{}, [parts]counts{} }

func (c counts) plus(d counts) counts {
	return counts{c.Ended + d.Ended, c.Failed + d.Failed, c.Timed + d.Timed, c.Slow + d.Slow}
}
