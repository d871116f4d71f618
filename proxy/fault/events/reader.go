package events

import (
	"bytes"
	"container/list"
	"errors"
	"io"
	"math"
	"time"

	"github.com/ctrlmesh/ctrlmesh/proxy/fault"
	"github.com/ctrlmesh/ctrlmesh/proxy/filter"
)

// ErrCut ends a watch that is to break off: the client must see no clean end.
var ErrCut = errors.New("the watch is cut by an injected fault")

// overhead is what an event that is held back holds beside its bytes.
const overhead = 512

// endOfInitial is the annotation of the bookmark that ends initial events.
var endOfInitial = []byte("k8s.io/initial-events-end")

// Options of a Reader.
type Options struct {
	// ContentType of the stream.
	ContentType string
	Faults      *fault.Watch
	// Interrupt ends the Read of the source that is under way, and all later ones.
	Interrupt func()
	// Still reports whether any of the faults are in force, and takes out of Faults those
	// that are not. It is asked again when changed is closed, and every second. What is
	// held back for what is not in force any more is read at once, and what comes then
	// as it comes. A watch that had nothing more to say ends.
	Still func() (still bool, changed <-chan struct{})
	// Hold is asked before the buffer grows (filter.Options). May be nil.
	Hold func(n int) error
	// Take takes n bytes for events that are held back, or tells that there is no room;
	// Give gives them back.
	Take func(n int64) bool
	Give func(n int64)
	// Gap is told what the client reads while something is kept from it. Without it
	// nothing may be dropped, and events of exempt objects stay behind what is held back.
	Gap *Gap
}

// Reader is a harmed watch. One goroutine of its own reads the source until Close.
type Reader struct {
	o      Options
	faults *fault.Watch // nil: they are off
	events *filter.Events

	arrivals chan arrival
	stop     chan struct{}
	stopped  chan struct{}

	start   time.Time
	asked   time.Time       // Still
	changed <-chan struct{} // what it said
	delays  int             // rules that delay
	timer   *time.Timer
	queue   []*held    // in the order of the source
	last    time.Time  // when the last of them is due
	dropped *list.List // of *held, those to be made up for first in front
	gaps    map[object]*list.Element
	silent  bool // stalled for good
	lost    bool // what came meanwhile is not kept

	stalling bool // it was, or is
	initial  bool // the bookmark that ends the initial events is or was in queue

	out  []piece
	rest io.Reader // what cannot be read as events, passed as it is
	err  error
}

// piece is what is to be read next, and what it has taken.
type piece struct {
	bytes []byte
	taken int64
}

type object struct{ namespace, name string }

// held is an event, or one that is kept from the client.
type held struct {
	bytes       []byte
	kind        string
	object      object
	one         bool // it is about object
	head        bool
	revision    string
	final       bool // the bookmark that ends the initial events
	taken       int64
	due         time.Time
	drop, twice bool
}

// arrival is what came of the source: an event, or the end of what can be read.
type arrival struct {
	event *held
	err   error
}

// New harms what src gives. It fails for what cannot be read, with filter.ErrType, and
// has read nothing then.
func New(src io.Reader, o Options) (*Reader, error) {
	in, err := filter.NewEvents(src, filter.Options{ContentType: o.ContentType, Watch: true, Hold: o.Hold})
	if err != nil {
		return nil, err
	}
	r := &Reader{
		o: o, faults: o.Faults, events: in,
		arrivals: make(chan arrival), stop: make(chan struct{}), stopped: make(chan struct{}),
		start: time.Now(), timer: time.NewTimer(math.MaxInt64),
		dropped: list.New(), gaps: map[object]*list.Element{}, delays: o.Faults.Delays(),
	}
	go r.read()
	return r, nil
}

// read is the goroutine.
func (r *Reader) read() {
	defer close(r.stopped)
	for {
		e, err := r.events.Next()
		a := arrival{err: err}
		if err == nil {
			a.event = keep(&e, r.events.Protobuf())
		}
		select {
		case r.arrivals <- a:
		case <-r.stop:
			return
		}
		if err != nil {
			return
		}
	}
}

func keep(e *filter.Event, protobuf bool) *held {
	h := &held{
		kind: string(e.Kind), head: e.Head, revision: string(e.Revision),
		object: object{string(e.Key.Namespace), string(e.Key.Name)},
		bytes:  make([]byte, len(e.Bytes), len(e.Bytes)+1),
	}
	copy(h.bytes, e.Bytes)
	switch h.kind {
	case "ADDED", "MODIFIED", "DELETED":
		h.one = e.One
	}
	h.final = h.kind == "BOOKMARK" && bytes.Contains(h.bytes, endOfInitial)
	if !protobuf {
		h.bytes = append(h.bytes, '\n')
	}
	return h
}

// Close ends the reader, and interrupts the source: it is not read any more.
func (r *Reader) Close() error {
	close(r.stop)
	r.o.Interrupt()
	<-r.stopped
	r.timer.Stop()
	r.forget()
	for e := r.dropped.Front(); e != nil; e = r.dropped.Front() {
		r.give(r.undrop(e).taken)
	}
	for _, p := range r.out {
		r.give(p.taken)
	}
	r.out, r.rest, r.err = nil, nil, io.ErrClosedPipe
	return nil
}

// Read implements io.Reader. It waits until an event is to be read.
func (r *Reader) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	for len(r.out) == 0 {
		switch {
		case r.rest != nil:
			return r.rest.Read(p)
		case r.err != nil:
			return 0, r.err
		}
		r.step()
	}
	n := 0
	for n < len(p) && len(r.out) > 0 {
		first := &r.out[0]
		c := copy(p[n:], first.bytes)
		n += c
		if first.bytes = first.bytes[c:]; len(first.bytes) == 0 {
			r.give(first.taken)
			*first = piece{}
			r.out = r.out[1:]
		}
	}
	return n, nil
}

// step does what is due, or waits for something.
func (r *Reader) step() {
	now := time.Now()
	if r.elapse(now); len(r.out) > 0 || r.err != nil {
		return
	}
	r.timer.Reset(r.next(now))
	select {
	case a := <-r.arrivals:
		if a.err != nil {
			r.end()
		} else {
			r.arrive(a.event, time.Now())
		}
	case <-r.timer.C:
	case <-r.changed:
		r.asked = time.Time{}
	}
}

// elapse does what is due.
func (r *Reader) elapse(now time.Time) {
	f := r.faults
	if f == nil {
		return
	}
	if now.Sub(r.asked) >= time.Second {
		still := false
		if still, r.changed = r.o.Still(); !still {
			r.off()
			return
		}
		r.asked = now
		if n := f.Delays(); n < r.delays {
			r.delays = n
			r.hurry(now)
		}
	}
	age := now.Sub(r.start)
	switch {
	case f.Gone && age >= f.GoneAfter:
		f.Did(fault.WatchGone)
		r.makeUp()
		r.out = append(r.out, piece{bytes: expired(r.events.Protobuf())})
		r.err = io.EOF
		return
	case f.Cut && age >= f.CutAfter:
		f.Did(fault.WatchCut)
		r.makeUp()
		r.err = ErrCut
		return
	case r.stalled(age):
		if !r.stalling {
			r.stalling = true
			f.Did(fault.WatchStall)
		}
		if f.StallLasts == 0 && !r.silent {
			// What comes is not kept: the client resumes from before it.
			r.silent, r.lost = true, len(r.queue) > 0
			r.forget()
		}
		return
	case r.silent:
		r.makeUp()
		r.err = io.EOF
		return
	}
	if f.Drop == nil {
		r.makeUp()
	}
	for len(r.queue) > 0 && !r.queue[0].due.After(now) {
		h := r.queue[0]
		r.queue[0] = nil
		r.queue = r.queue[1:]
		r.pass(h, now)
	}
	for e := r.dropped.Front(); e != nil && !e.Value.(*held).due.After(now); e = r.dropped.Front() {
		r.deliver(r.undrop(e))
	}
}

func (r *Reader) stalled(age time.Duration) bool {
	f := r.faults
	return f.Stall && age >= f.StallAfter && (f.StallLasts == 0 || age-f.StallAfter < f.StallLasts)
}

// next is how long nothing is due.
func (r *Reader) next(now time.Time) time.Duration {
	wait := time.Duration(math.MaxInt64)
	f := r.faults
	if f == nil {
		return wait
	}
	wait = r.asked.Add(time.Second).Sub(now)
	age := now.Sub(r.start)
	at := func(set bool, after time.Duration) {
		if set && after > age {
			wait = min(wait, after-age)
		}
	}
	at(f.Gone, f.GoneAfter)
	at(f.Cut, f.CutAfter)
	at(f.Stall, f.StallAfter)
	if r.stalled(age) {
		at(f.StallLasts > 0, f.StallAfter+f.StallLasts)
		return wait
	}
	if len(r.queue) > 0 {
		wait = min(wait, r.queue[0].due.Sub(now))
	}
	if e := r.dropped.Front(); e != nil {
		wait = min(wait, e.Value.(*held).due.Sub(now))
	}
	return wait
}

// arrive takes an event of the source.
func (r *Reader) arrive(h *held, now time.Time) {
	f := r.faults
	stalled := f != nil && r.stalled(now.Sub(r.start))
	r.initial = r.initial && len(r.queue) > 0
	exempt := f != nil && h.one && f.Exempt != nil && f.Exempt(h.object.namespace)
	switch {
	case exempt && r.o.Gap != nil && !r.initial: // it waits for nothing
		if len(r.queue) > 0 || r.lost {
			r.o.Gap.Cover(h.revision)
		}
		r.deliver(h)
		return
	case r.silent || stalled && f.StallLasts == 0:
		r.lost = true
		return
	}
	var late time.Duration
	if f != nil && h.one && !exempt {
		if f.Delay != nil {
			late = f.Delay()
		}
		h.drop = f.Drop != nil && f.Drop() && !h.head
		h.twice = f.Duplicate != nil && f.Duplicate() && !h.drop
	}
	if h.due = now.Add(late); len(r.queue) > 0 && h.due.Before(r.last) {
		h.due = r.last
	}
	if len(r.queue) == 0 && late <= 0 && !stalled {
		r.pass(h, now)
		return
	}
	if !r.take(h) {
		r.flush()
		h.drop = false
		r.pass(h, now)
		return
	}
	r.last = h.due
	r.queue = append(r.queue, h)
	r.initial = r.initial || h.final
	if late > 0 {
		f.Did(fault.WatchDelay)
	}
}

// pass has the client read an event, unless it is to be dropped.
func (r *Reader) pass(h *held, now time.Time) {
	gap := r.gaps[h.object]
	switch {
	case !h.one:
		if r.dropped.Len() > 0 && h.kind == "BOOKMARK" && !h.final {
			r.give(h.taken)
			return
		}
		r.makeUp()
	case h.drop && r.faults.Drop != nil && (h.taken > 0 || r.take(h)):
		r.faults.Did(fault.WatchDrop)
		h.due = now.Add(r.faults.MadeUpAfter)
		if gap == nil {
			r.gaps[h.object] = r.dropped.PushBack(h)
			return
		}
		// The client hears of the object no later for that.
		was := gap.Value.(*held)
		h.due = was.due
		gap.Value = h
		r.give(was.taken)
		return
	case gap != nil:
		r.give(r.undrop(gap).taken) // what passes now is enough
	}
	if h.twice && r.faults != nil && r.faults.Duplicate != nil {
		r.faults.Did(fault.WatchDuplicate)
		r.deliver(&held{bytes: h.bytes, revision: h.revision})
	}
	r.deliver(h)
}

// undrop takes an event out of what was dropped.
func (r *Reader) undrop(e *list.Element) *held {
	h := r.dropped.Remove(e).(*held)
	delete(r.gaps, h.object)
	return h
}

// deliver has the client read an event.
func (r *Reader) deliver(h *held) {
	if r.dropped.Len() > 0 {
		r.o.Gap.Cover(h.revision)
	}
	r.out = append(r.out, piece{h.bytes, h.taken})
}

// makeUp makes up for what was dropped, the last first: who resumes from the version
// that is read last then misses nothing.
func (r *Reader) makeUp() {
	for e := r.dropped.Back(); e != nil; e = r.dropped.Back() {
		r.deliver(r.undrop(e))
	}
}

// flush has the client read all that is held back.
func (r *Reader) flush() {
	r.makeUp()
	for _, h := range r.queue {
		h.drop = false
		r.pass(h, h.due)
	}
	r.queue = nil
}

// hurry has all that is delayed be due.
func (r *Reader) hurry(now time.Time) {
	for _, h := range r.queue {
		h.due = now
	}
	r.last = now
}

// off ends the faults.
func (r *Reader) off() {
	r.faults, r.changed = nil, nil
	r.flush()
	if r.silent {
		r.err = io.EOF
	}
}

// end is that of the source, or of what can be read of it.
func (r *Reader) end() {
	r.flush()
	r.faults, r.changed = nil, nil
	if !r.silent {
		r.rest = r.events.Rest()
		return
	}
	if r.err = r.events.Ended(); r.err == nil {
		r.err = io.EOF // the client resumes from where it is
	}
}

// take takes what h holds.
func (r *Reader) take(h *held) bool {
	n := int64(len(h.bytes) + overhead)
	if !r.o.Take(n) {
		return false
	}
	h.taken = n
	return true
}

func (r *Reader) give(n int64) {
	if n > 0 {
		r.o.Give(n)
	}
}

// forget lets go of what is queued.
func (r *Reader) forget() {
	for _, h := range r.queue {
		r.give(h.taken)
	}
	r.queue = nil
}
