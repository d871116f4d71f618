package events

import (
	"bytes"
	"container/list"
	"errors"
	"io"
	"math"
	"slices"
	"time"

	"github.com/ctrlmesh/ctrlmesh/proxy/fault"
	"github.com/ctrlmesh/ctrlmesh/proxy/filter"
)

// ErrCut is the error of Read when a fault cuts the watch: the client must not see a
// clean end.
var ErrCut = errors.New("watch cut by an injected fault")

// overhead is how many bytes of memory an event that is held back takes besides its
// encoding.
const overhead = 512

// endOfInitial is the annotation of the bookmark that ends the initial events.
var endOfInitial = []byte("k8s.io/initial-events-end")

// Options are the options of a Reader.
type Options struct {
	// ContentType of the stream.
	ContentType string
	Faults      *fault.Watch
	// Interrupt ends the Read of the source that is under way, and all later ones.
	Interrupt func()
	// Still reports whether any of the faults are in force, and removes from Faults those
	// that are not. It is called again when changed is closed, and every second. Events
	// that were held back by faults that are not in force any more are delivered at once,
	// and later ones without delay. A watch that was stalled for good ends.
	Still func() (still bool, changed <-chan struct{})
	// Hold is called before the buffer grows, and Release when it has shrunk (Hold and Give
	// of filter.Options). May be nil.
	Hold    func(n int) error
	Release func(n int)
	// Take takes n bytes for events that are held back, and reports whether there was
	// room. Give gives them back.
	Take func(n int64) bool
	Give func(n int64)
	// Gap gets the versions that the client reads while an event is withheld from it. If
	// it is nil, Faults must not drop events, and events of exempt objects wait behind
	// those that are held back.
	Gap *Gap
}

// Reader reads a watch and injects faults into it. Its own goroutine reads the source
// until Close.
type Reader struct {
	o      Options
	faults *fault.Watch // nil: no faults are in force any more
	source
	clock
	backlog
	dropped
	stall

	out  []*held
	rest io.Reader // what cannot be read as events, passed unchanged
	err  error
}

// source is the reading of the events as they come.
type source struct {
	events   *filter.Events
	arrivals chan *held // nil: there are no further events
	stop     chan struct{}
	stopped  chan struct{}
}

// clock decides when the faults are looked at.
type clock struct {
	start   time.Time
	asked   time.Time       // when Options.Still was called last
	changed <-chan struct{} // from Options.Still
	delays  int             // number of rules that delay
	timer   *time.Timer
}

// backlog is the events that are held back.
type backlog struct {
	queue   []*held   // in the order of the source
	last    time.Time // when the last of them is due
	initial bool      // the bookmark that ends the initial events is or was in queue
}

// dropped is the dropped events that are delivered late.
type dropped struct {
	drops *list.List // of *held, ordered by due
	gaps  map[object]*list.Element
}

type stall struct {
	stalling bool // a stall has begun, and may be over
	silent   bool // stalled for good
	lost     bool // events were discarded while silent
}

type object struct{ namespace, name string }

// held is an event of the source.
type held struct {
	bytes       []byte
	kind        string
	object      object
	one         bool // the event is about a single object
	head        bool
	revision    string
	final       bool // the bookmark that ends the initial events
	taken       int64
	due         time.Time
	drop, twice bool
}

// New returns a Reader that injects faults into the events of src. If the content type is
// not supported, it fails with filter.ErrType and has read nothing.
func New(src io.Reader, o Options) (*Reader, error) {
	in, err := filter.NewEvents(src, filter.Options{ContentType: o.ContentType, Watch: true, Hold: o.Hold, Give: o.Release})
	if err != nil {
		return nil, err
	}
	r := &Reader{
		o: o, faults: o.Faults,
		source:  source{in, make(chan *held), make(chan struct{}), make(chan struct{})},
		clock:   clock{start: time.Now(), timer: time.NewTimer(math.MaxInt64), delays: o.Faults.Delays()},
		dropped: dropped{list.New(), map[object]*list.Element{}},
	}
	go r.read()
	return r, nil
}

// read reads the source. It runs in the Reader's goroutine.
func (r *Reader) read() {
	defer close(r.stopped)
	for {
		var h *held
		if e, err := r.events.Next(); err == nil {
			h = keep(&e, r.events.Protobuf())
		}
		select {
		case r.arrivals <- h:
		case <-r.stop:
			return
		}
		if h == nil {
			return
		}
	}
}

// changes are the kinds of events about objects.
var changes = []string{"ADDED", "MODIFIED", "DELETED"}

func keep(e *filter.Event, protobuf bool) *held {
	h := &held{
		kind: string(e.Kind), head: e.Head, revision: string(e.Revision),
		object: object{string(e.Key.Namespace), string(e.Key.Name)},
		bytes:  make([]byte, len(e.Bytes), len(e.Bytes)+1),
	}
	copy(h.bytes, e.Bytes)
	h.one = e.One && slices.Contains(changes, h.kind)
	h.final = h.kind == "BOOKMARK" && bytes.Contains(h.bytes, endOfInitial)
	if !protobuf {
		h.bytes = append(h.bytes, '\n')
	}
	return h
}

// Close ends the Reader and interrupts the source. The source is not read after Close
// returns.
func (r *Reader) Close() error {
	close(r.stop)
	r.o.Interrupt()
	<-r.stopped
	r.timer.Stop()
	r.forget()
	for e := r.drops.Front(); e != nil; e = r.drops.Front() {
		r.o.Give(r.undrop(e).taken)
	}
	for _, p := range r.out {
		r.o.Give(p.taken)
	}
	r.out, r.rest, r.err = nil, nil, io.ErrClosedPipe
	return nil
}

// Read implements io.Reader. It blocks until there is an event to deliver.
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
		first := r.out[0]
		c := copy(p[n:], first.bytes)
		n += c
		if first.bytes = first.bytes[c:]; len(first.bytes) == 0 {
			r.o.Give(first.taken)
			r.out[0] = nil
			r.out = r.out[1:]
		}
	}
	return n, nil
}

// step does what is due, or waits for an event, a change of the faults or the next due
// time.
func (r *Reader) step() {
	now := time.Now()
	if r.elapse(now); len(r.out) > 0 || r.err != nil {
		return
	}
	r.timer.Reset(r.next(now))
	select {
	case h := <-r.arrivals:
		if h == nil {
			r.end()
		} else {
			r.arrive(h, time.Now())
		}
	case <-r.timer.C:
	case <-r.changed:
		r.asked = time.Time{}
	}
}

// elapse injects the faults and delivers the events that are due.
func (r *Reader) elapse(now time.Time) {
	if r.faults != nil && now.Sub(r.asked) >= time.Second {
		r.ask(now)
	}
	f := r.faults
	if f == nil || r.interrupt(now.Sub(r.start)) {
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
	for e := r.drops.Front(); e != nil && !e.Value.(*held).due.After(now); e = r.drops.Front() {
		r.deliver(r.undrop(e))
	}
}

// ask removes the faults that are not in force any more.
func (r *Reader) ask(now time.Time) {
	still := false
	if still, r.changed = r.o.Still(); !still {
		r.off()
		return
	}
	r.asked = now
	if n := r.faults.Delays(); n < r.delays {
		r.delays = n
		r.hurry(now)
	}
}

// interrupt ends or stalls a watch of some age, and reports whether it did.
func (r *Reader) interrupt(age time.Duration) bool {
	f := r.faults
	switch {
	case f.Gone != nil && age >= *f.Gone:
		f.Did(fault.WatchGone)
		r.makeUp()
		r.out = append(r.out, &held{bytes: expired(r.events.Protobuf())})
		r.err = io.EOF
	case f.Cut != nil && age >= *f.Cut:
		f.Did(fault.WatchCut)
		r.makeUp()
		r.err = ErrCut
	case r.stalled(age):
		if !r.stalling {
			r.stalling = true
			f.Did(fault.WatchStall)
		}
		if f.StallLasts == 0 && !r.silent {
			// Events that arrive now are discarded: the client resumes from before them.
			r.silent, r.lost = true, len(r.queue) > 0
			r.forget()
		}
	case r.silent:
		r.makeUp()
		r.err = io.EOF
	default:
		return false
	}
	return true
}

func (r *Reader) stalled(age time.Duration) bool {
	f := r.faults
	return f.Stall != nil && age >= *f.Stall && (f.StallLasts == 0 || age-*f.Stall < f.StallLasts)
}

// next returns how long it takes until something is due.
func (r *Reader) next(now time.Time) time.Duration {
	wait := time.Duration(math.MaxInt64)
	f := r.faults
	if f == nil {
		return wait
	}
	wait = r.asked.Add(time.Second).Sub(now)
	age := now.Sub(r.start)
	for _, after := range []*time.Duration{f.Gone, f.Cut, f.Stall} {
		if after != nil && *after > age {
			wait = min(wait, *after-age)
		}
	}
	if r.stalled(age) {
		if f.StallLasts > 0 {
			wait = min(wait, *f.Stall+f.StallLasts-age)
		}
		return wait
	}
	if len(r.queue) > 0 {
		wait = min(wait, r.queue[0].due.Sub(now))
	}
	if e := r.drops.Front(); e != nil {
		wait = min(wait, e.Value.(*held).due.Sub(now))
	}
	return wait
}

// arrive handles an event of the source.
func (r *Reader) arrive(h *held, now time.Time) {
	f := r.faults
	stalled := f != nil && r.stalled(now.Sub(r.start))
	r.initial = r.initial && len(r.queue) > 0
	exempt := f != nil && h.exempt(f)
	if exempt && r.o.Gap != nil && !r.initial {
		r.overtake(h)
		return
	}
	if r.silent || stalled && f.StallLasts == 0 {
		r.lost = true
		return
	}
	late := time.Duration(0)
	if f != nil && !exempt {
		late = h.decide(f)
	}
	h.due = now.Add(late)
	if len(r.queue) > 0 || late > 0 || stalled {
		r.hold(h, now, late > 0)
	} else {
		r.pass(h, now)
	}
}

func (h *held) exempt(f *fault.Watch) bool {
	return h.one && f.Exempt != nil && f.Exempt(h.object.namespace)
}

// overtake delivers an event before those that are held back.
func (r *Reader) overtake(h *held) {
	if len(r.queue) > 0 || r.lost {
		r.o.Gap.Cover(h.revision)
	}
	r.deliver(h)
}

// decide decides which faults are injected into an event, and returns its delay.
func (h *held) decide(f *fault.Watch) (late time.Duration) {
	if !h.one {
		return 0
	}
	if f.Delay != nil {
		late = f.Delay()
	}
	h.drop = f.Drop != nil && f.Drop() && !h.head
	h.twice = f.Duplicate != nil && f.Duplicate() && !h.drop
	return late
}

// hold holds an event back. If there is no room, it delivers all events.
func (r *Reader) hold(h *held, now time.Time, late bool) {
	if len(r.queue) > 0 && h.due.Before(r.last) {
		h.due = r.last
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
	if late {
		r.faults.Did(fault.WatchDelay)
	}
}

// pass delivers an event, or drops it if so decided.
func (r *Reader) pass(h *held, now time.Time) {
	gap := r.gaps[h.object]
	switch {
	case !h.one:
		if r.drops.Len() > 0 && h.kind == "BOOKMARK" && !h.final {
			r.o.Give(h.taken)
			return
		}
		r.makeUp()
	case h.drop && r.faults.Drop != nil && (h.taken > 0 || r.take(h)):
		r.faults.Did(fault.WatchDrop)
		h.due = now.Add(r.faults.MadeUpAfter)
		if gap == nil {
			r.gaps[h.object] = r.drops.PushBack(h)
			return
		}
		// Keep the due time: the client must not get news of the object later.
		was := gap.Value.(*held)
		h.due = was.due
		gap.Value = h
		r.o.Give(was.taken)
		return
	case gap != nil:
		r.o.Give(r.undrop(gap).taken) // the later event replaces the dropped one
	}
	if h.twice && r.faults != nil && r.faults.Duplicate != nil {
		r.faults.Did(fault.WatchDuplicate)
		r.deliver(&held{bytes: h.bytes, revision: h.revision})
	}
	r.deliver(h)
}

// undrop removes an event from the dropped ones and returns it.
func (r *Reader) undrop(e *list.Element) *held {
	h := r.drops.Remove(e).(*held)
	delete(r.gaps, h.object)
	return h
}

// deliver appends an event to the output.
func (r *Reader) deliver(h *held) {
	if r.drops.Len() > 0 {
		r.o.Gap.Cover(h.revision)
	}
	r.out = append(r.out, h)
}

// makeUp delivers the dropped events, the latest first: a client that resumes from the
// last version that it read then misses nothing.
func (r *Reader) makeUp() {
	for e := r.drops.Back(); e != nil; e = r.drops.Back() {
		r.deliver(r.undrop(e))
	}
}

// flush delivers all events that are dropped or held back.
func (r *Reader) flush() {
	r.makeUp()
	for _, h := range r.queue {
		h.drop = false
		r.pass(h, h.due)
	}
	r.queue = nil
}

// hurry makes all events that are held back due.
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

// end handles the end of the source, or of what can be read of it as events.
func (r *Reader) end() {
	r.flush()
	r.faults, r.changed = nil, nil
	if !r.silent {
		r.rest = r.events.Rest()
		return
	}
	if r.err = r.events.Ended(); r.err == nil {
		r.err = io.EOF // the client resumes from the last version that it read
	}
}

// take takes the memory of h from the account, and reports whether there was room.
func (r *Reader) take(h *held) bool {
	n := int64(len(h.bytes) + overhead)
	if !r.o.Take(n) {
		return false
	}
	h.taken = n
	return true
}

// forget discards the events that are held back.
func (r *Reader) forget() {
	for _, h := range r.queue {
		r.o.Give(h.taken)
	}
	r.queue = nil
}
