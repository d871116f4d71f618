package events_test

import (
	"bufio"
	"bytes"
	"io"
	"math/rand/v2"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/ctrlmesh/ctrlmesh/proxy/fault"
	"github.com/ctrlmesh/ctrlmesh/proxy/fault/events"
)

// world has the objects of an apiserver and all their events. The n-th event has version
// n+1.
type world struct {
	mu      sync.Mutex
	log     []change
	changed chan struct{}
}

type change struct {
	kind watch.EventType
	name string
}

// state returns the version of the last change of each object.
type state map[string]int

// now returns the last version, the events until then, and a channel that the next event
// closes.
func (w *world) now() (version int, log []change, next <-chan struct{}) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.log), w.log, w.changed
}

func (w *world) state(until int) state {
	_, log, _ := w.now()
	s := state{}
	for i, c := range log[:until] {
		if s[c.name] = i + 1; c.kind == watch.Deleted {
			delete(s, c.name)
		}
	}
	return s
}

func (w *world) happen(r *rand.Rand) {
	name := string(rune('a' + r.IntN(4)))
	kind := watch.Added
	last, _, _ := w.now()
	if _, is := w.state(last)[name]; is {
		kind = []watch.EventType{watch.Modified, watch.Modified, watch.Deleted}[r.IntN(3)]
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.log = append(w.log, change{kind, name})
	close(w.changed)
	w.changed = make(chan struct{})
}

// watch writes the events after a version until done is closed, with bookmarks.
func (w *world) watch(media string, after int, to *io.PipeWriter, r *rand.Rand, done <-chan struct{}) {
	initial := after < 0
	if initial {
		after, _, _ = w.now()
		for name, version := range w.state(after) {
			if _, err := to.Write(wire(media, watch.Added, object(name, version))); err != nil {
				return
			}
		}
	}
	bookmark := func() bool {
		o := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{ResourceVersion: strconv.Itoa(after)}}
		if initial {
			o.Annotations, initial = map[string]string{metav1.InitialEventsAnnotationKey: "true"}, false
		}
		_, err := to.Write(wire(media, watch.Bookmark, o))
		return err == nil
	}
	if initial && !bookmark() {
		return
	}
	for {
		last, log, next := w.now()
		for after < last {
			c := log[after]
			after++
			if _, err := to.Write(wire(media, c.kind, object(c.name, after))); err != nil {
				return
			}
		}
		select {
		case <-next:
		case <-time.After(time.Duration(1+r.IntN(20)) * time.Second):
			if !bookmark() {
				return
			}
		case <-done:
			_ = to.Close()
			return
		}
	}
}

// object is one of a namespace of its own.
func object(name string, version int) *corev1.ConfigMap {
	o := config(name, strconv.Itoa(version))
	o.Namespace = name
	return o
}

// client applies events as a reflector does.
type client struct {
	state   state
	version int  // to resume from; below 0: none
	fresh   bool // state is whole
}

func randomFaults(r *rand.Rand) *fault.Watch {
	some := func() time.Duration { return time.Duration(r.IntN(30)) * time.Second }
	often := func() bool { return r.IntN(3) == 0 }
	chance := func() func() bool {
		if often() {
			return nil
		}
		return func() bool { return r.IntN(2) == 0 }
	}
	after := func(set bool, d time.Duration) *time.Duration {
		if !set {
			return nil
		}
		return &d
	}
	quiet := string(rune('a' + r.IntN(8))) // may be of no object
	f := &fault.Watch{
		Gone: after(r.IntN(6) == 0, some()), Cut: after(often(), some()),
		Stall: after(often(), some()), StallLasts: some(),
		Duplicate: chance(), Drop: chance(), MadeUpAfter: some(),
		Exempt: func(namespace string) bool { return namespace == quiet },
	}
	if often() {
		f.Delay = func() time.Duration { return some() * time.Duration(r.IntN(2)) }
	}
	return f
}

// FuzzTruth injects random faults into random events, for a client that disconnects at any
// moment, even within an event. On one watch the client must not read a bookmark before
// events that precede it, nor an older state of an object after a newer one. In the end it
// must have the true state.
func FuzzTruth(f *testing.F) {
	for seed := range uint64(300) {
		f.Add(seed, seed%2 == 0)
	}
	f.Fuzz(func(t *testing.T, seed uint64, protobuf bool) {
		media := jsonType
		if protobuf {
			media = protoType
		}
		synctest.Test(t, func(t *testing.T) { truth(t, media, rand.New(rand.NewPCG(seed, 7))) })
	})
}

func truth(t *testing.T, media string, r *rand.Rand) {
	w := &world{changed: make(chan struct{})}
	c := &client{state: state{}, version: -1}
	var gaps []*events.Gap // of all watches; removed once over and reported to a client
	var taken int64
	over, off := time.Now().Add(5*time.Minute), make(chan struct{})
	for watches := 0; ; watches++ {
		require.Less(t, watches, 2000, "the client never comes to rest")
		calm := !time.Now().Before(over)
		if calm && watches > 0 {
			select {
			case <-off:
			default:
				close(off)
			}
		}
		if c.version >= 0 {
			missed := false
			for _, g := range gaps {
				missed = g.Covers(strconv.Itoa(c.version)) || missed
			}
			if missed {
				gaps, c.version = nil, -1 // a 410 makes it list
			}
		}
		if c.version < 0 && r.IntN(2) == 0 {
			c.version, _, _ = w.now()
			c.state, c.fresh = w.state(c.version), true
		}
		from, to := io.Pipe()
		done := make(chan struct{})
		ended := make(chan struct{})
		after, other := c.version, rand.New(rand.NewPCG(r.Uint64(), 1))
		go func() { w.watch(media, after, to, other, done); close(ended) }()
		gap := &events.Gap{}
		gaps = append(gaps, gap)
		faults := randomFaults(r)
		if calm {
			faults = &fault.Watch{}
		}
		reader, err := events.New(from, events.Options{
			Interrupt:   func() { _ = from.Close() },
			ContentType: media, Faults: faults, Gap: gap,
			Still: func() (bool, <-chan struct{}) {
				select {
				case <-off:
					return false, nil
				default:
					return true, off
				}
			},
			Take: func(n int64) bool {
				if taken+n > 4000 {
					return false
				}
				taken += n
				return true
			},
			Give: func(n int64) { taken -= n },
		})
		require.NoError(t, err)
		if !calm {
			other := rand.New(rand.NewPCG(r.Uint64(), 2))
			go func() {
				for range other.IntN(20) {
					time.Sleep(time.Duration(other.IntN(5000)) * time.Millisecond)
					w.happen(other)
				}
				if other.IntN(2) == 0 {
					to.CloseWithError(io.ErrUnexpectedEOF)
				}
				close(done)
			}()
		} else {
			time.AfterFunc(time.Minute, func() { close(done) })
		}
		limit := int64(1 << 30)
		if !calm && r.IntN(2) == 0 {
			limit = int64(r.IntN(3000)) // the client goes, within an event or behind one
		}
		c.follow(t, w, media, io.LimitReader(reader, limit))
		require.NoError(t, reader.Close())
		<-ended
		require.Zero(t, taken)
		<-done
		if last, _, _ := w.now(); calm && c.version == last && c.fresh {
			break
		}
	}
	last, _, _ := w.now()
	require.Equal(t, w.state(last), c.state)
}

// follow applies a watch.
func (c *client) follow(t *testing.T, w *world, media string, r io.Reader) {
	initial := c.version < 0
	next := c.state
	if initial {
		next = state{}
	}
	seen := state{} // the last event of each object on this watch
	begun := c.version
	d := decoder(media, io.NopCloser(bufio.NewReader(r)))
	for {
		kind, o, err := d.Decode()
		if err != nil {
			break
		}
		if kind == watch.Error {
			c.version = -1
			return
		}
		m := o.(*corev1.ConfigMap)
		version, err := strconv.Atoi(m.ResourceVersion)
		require.NoError(t, err)
		switch kind {
		case watch.Bookmark:
			_, log, _ := w.now()
			for i := max(begun, 0); i < version && !initial; i++ {
				require.Greater(t, seen[log[i].name], i, "a bookmark passed an event")
			}
			if initial {
				require.Equal(t, w.state(version), next, "the initial events are not whole")
				require.Contains(t, m.Annotations, metav1.InitialEventsAnnotationKey)
				c.state, c.fresh, initial, begun = next, true, false, version
			}
		case watch.Deleted:
			delete(next, m.Name)
		default:
			next[m.Name] = version
		}
		if kind != watch.Bookmark {
			require.LessOrEqual(t, seen[m.Name], version, "an older state came after a newer")
			seen[m.Name] = version
		}
		if !initial {
			c.version = version
		}
	}
	if initial {
		c.version = -1
	}
}

// FuzzBytes reads any bytes as a stream: nothing is added, and without faults that drop
// events nothing is lost.
func FuzzBytes(f *testing.F) {
	for _, media := range []string{jsonType, protoType} {
		var stream []byte
		for i, kind := range []watch.EventType{watch.Added, watch.Modified, watch.Deleted} {
			stream = append(stream, wire(media, kind, config("a", strconv.Itoa(i)))...)
		}
		f.Add(stream, media == protoType, byte(0))
		f.Add(stream, media == protoType, byte(7))
		f.Add(append(stream, stream[:50]...), media == protoType, byte(4))
	}
	f.Add([]byte("{}[]{\"type\":\"ADDED\",\"object\":null} {\"type\":\"BOOKMARK\"}"), false, byte(2))
	f.Fuzz(func(t *testing.T, in []byte, protobuf bool, which byte) {
		media := jsonType
		if protobuf {
			media = protoType
		}
		synctest.Test(t, func(t *testing.T) {
			asked := 0
			decide := func() bool { asked++; return asked%2 == 0 }
			faults := &fault.Watch{MadeUpAfter: time.Minute}
			if which&1 != 0 {
				faults.Drop = decide
			}
			if which&2 != 0 {
				faults.Duplicate = decide
			}
			if which&4 != 0 {
				faults.Delay = func() time.Duration { return time.Duration(asked) * time.Second }
			}
			if which&8 != 0 {
				faults.Stall, faults.StallLasts = new(time.Duration(0)), time.Minute
			}
			from, to := io.Pipe()
			go func() {
				_, _ = to.Write(in)
				_ = to.Close()
			}()
			gap := &events.Gap{}
			r, err := events.New(from, events.Options{
				Interrupt:   func() { _ = from.Close() },
				ContentType: media, Faults: faults, Gap: gap,
				Still: func() (bool, <-chan struct{}) { return true, nil },
				Take:  func(int64) bool { return which&16 == 0 }, Give: func(int64) {},
			})
			require.NoError(t, err)
			out, err := io.ReadAll(r)
			require.NoError(t, err)
			require.NoError(t, r.Close())
			if !protobuf {
				in, out = squeeze(in), squeeze(out)
			}
			if which&7 == 0 || which&7 == 4 {
				require.Equal(t, string(in), string(out))
			}
			if which&2 == 0 {
				require.LessOrEqual(t, len(out), len(in))
			}
		})
	})
}

// squeeze removes the spaces, which may differ between events.
func squeeze(b []byte) []byte {
	return bytes.Map(func(c rune) rune {
		switch c {
		case ' ', '\n', '\r', '\t':
			return -1
		}
		return c
	}, bytes.ToValidUTF8(b, []byte("?")))
}
