package events_test

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/ctrlmesh/ctrlmesh/proxy/fault"
	"github.com/ctrlmesh/ctrlmesh/proxy/fault/events"
	"github.com/ctrlmesh/ctrlmesh/proxy/filter"
)

type readCloser = io.ReadCloser

// stream is a watch with faults. The test is its source and its client.
type stream struct {
	t     testing.TB
	media string
	*events.Reader
	gap   events.Gap
	up    *io.PipeWriter
	taken int64
	room  int64
	off   chan struct{}
	out   chan string
}

func faulty(t testing.TB, media string, f *fault.Watch) *stream {
	s := &stream{t: t, media: media, room: 1 << 20, off: make(chan struct{}), out: make(chan string, 100)}
	from, to := io.Pipe()
	s.up = to
	var err error
	s.Reader, err = events.New(from, events.Options{
		Interrupt:   func() { _ = from.Close() },
		ContentType: media + ";stream=watch",
		Faults:      f,
		Still: func() (bool, <-chan struct{}) {
			select {
			case <-s.off:
				return false, nil
			default:
				return true, s.off
			}
		},
		Take: func(n int64) bool {
			if s.taken+n > s.room {
				return false
			}
			s.taken += n
			return true
		},
		Give: func(n int64) { s.taken -= n },
		Gap:  &s.gap,
	})
	require.NoError(t, err)
	go func() {
		d := decoder(media, s.Reader)
		for {
			e := read(t, d)
			s.out <- e
			if !strings.Contains(e, "/") && e != "ERROR" {
				return
			}
		}
	}()
	return s
}

func (s *stream) send(kind watch.EventType, name, version string) {
	o := config(name, version)
	if name == "end" {
		o.Annotations = map[string]string{metav1.InitialEventsAnnotationKey: "true"}
	}
	_, err := s.up.Write(wire(s.media, kind, o))
	require.NoError(s.t, err)
	synctest.Wait()
}

// got returns the events that the client has read since the last call.
func (s *stream) got() (out []string) {
	synctest.Wait()
	for {
		select {
		case e := <-s.out:
			out = append(out, e)
		default:
			return out
		}
	}
}

func (s *stream) finish() {
	_ = s.up.Close()
	s.got()
	require.NoError(s.t, s.Close())
	synctest.Wait()
	require.Zero(s.t, s.taken, "all is given back")
}

// script returns a function that decides about each event in turn: true for an x.
func script(s string) func() bool {
	return func() bool {
		if s == "" {
			return false
		}
		yes := s[0] == 'x'
		s = s[1:]
		return yes
	}
}

func each(t *testing.T, f func(t *testing.T, media string)) {
	for _, media := range []string{jsonType, protoType} {
		t.Run(media, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { f(t, media) })
		})
	}
}

func TestGoneEndsTheWatchWith410(t *testing.T) {
	each(t, func(t *testing.T, media string) {
		s := faulty(t, media, &fault.Watch{Gone: new(time.Minute)})
		s.send(watch.Added, "a", "1")
		time.Sleep(59 * time.Second)
		require.Equal(t, []string{"ADDED a/1"}, s.got())
		time.Sleep(time.Second)
		require.Equal(t, []string{"ERROR", "EOF"}, s.got())
		s.finish()
	})
}

func TestGoneWithoutDelayEndsTheWatchAtOnce(t *testing.T) {
	each(t, func(t *testing.T, media string) {
		s := faulty(t, media, &fault.Watch{Gone: new(time.Duration(0))})
		require.Equal(t, []string{"ERROR", "EOF"}, s.got())
		s.finish()
	})
}

func TestCutBreaksTheWatchOff(t *testing.T) {
	each(t, func(t *testing.T, media string) {
		s := faulty(t, media, &fault.Watch{Cut: new(time.Minute), Drop: script("x"), MadeUpAfter: time.Hour})
		s.send(watch.Added, "a", "1")
		s.send(watch.Added, "b", "2")
		time.Sleep(time.Minute)
		got := s.got()
		require.Len(t, got, 3)
		require.Equal(t, []string{"ADDED b/2", "ADDED a/1"}, got[:2], "what was dropped comes before")
		_, err := s.Read(make([]byte, 1))
		require.ErrorIs(t, err, events.ErrCut)
		require.True(t, s.gap.Covers("2"), "b may be all that the client read")
		require.False(t, s.gap.Covers("1"), "who read the last has read all")
		s.finish()
	})
}

func TestStallHoldsEventsBack(t *testing.T) {
	each(t, func(t *testing.T, media string) {
		s := faulty(t, media, &fault.Watch{Stall: new(time.Minute), StallLasts: time.Minute})
		s.send(watch.Added, "a", "1")
		require.Equal(t, []string{"ADDED a/1"}, s.got())
		time.Sleep(61 * time.Second)
		s.send(watch.Modified, "a", "2")
		s.send(watch.Bookmark, "", "3")
		time.Sleep(58 * time.Second)
		require.Empty(t, s.got())
		time.Sleep(time.Second)
		require.Equal(t, []string{"MODIFIED a/2", "BOOKMARK /3"}, s.got())
		require.True(t, s.gap.Empty())
		s.finish()
	})
}

func TestEndlessStallDiscardsEvents(t *testing.T) {
	each(t, func(t *testing.T, media string) {
		s := faulty(t, media, &fault.Watch{Stall: new(time.Duration(0))})
		for i := range 100 {
			s.send(watch.Modified, "a", fmt.Sprint(i))
		}
		time.Sleep(time.Hour)
		require.Empty(t, s.got())
		require.Zero(t, s.taken, "what is never reported is not kept")
		require.NoError(t, s.up.Close())
		require.Equal(t, []string{"EOF"}, s.got())
		require.True(t, s.gap.Empty(), "the client resumes from before")
		s.finish()
	})
}

func TestLiftedEndlessStallEndsTheWatch(t *testing.T) {
	each(t, func(t *testing.T, media string) {
		s := faulty(t, media, &fault.Watch{Stall: new(time.Duration(0))})
		s.send(watch.Modified, "a", "1")
		close(s.off)
		require.Equal(t, []string{"EOF"}, s.got())
		s.finish()
	})
}

func TestDelayHoldsLaterEventsBack(t *testing.T) {
	each(t, func(t *testing.T, media string) {
		late := []time.Duration{0, time.Minute, 0, time.Second}
		s := faulty(t, media, &fault.Watch{Delay: func() time.Duration {
			d := late[0]
			late = late[1:]
			return d
		}})
		s.send(watch.Added, "a", "1")
		require.Equal(t, []string{"ADDED a/1"}, s.got())
		s.send(watch.Added, "b", "2")
		s.send(watch.Added, "c", "3")
		s.send(watch.Bookmark, "", "4")
		s.send(watch.Modified, "a", "5")
		time.Sleep(59 * time.Second)
		require.Empty(t, s.got())
		time.Sleep(time.Second)
		require.Equal(t, []string{"ADDED b/2", "ADDED c/3", "BOOKMARK /4", "MODIFIED a/5"}, s.got())
		s.finish()
	})
}

func TestDuplicateDeliversEventsTwice(t *testing.T) {
	each(t, func(t *testing.T, media string) {
		s := faulty(t, media, &fault.Watch{Duplicate: func() bool { return true }})
		s.send(watch.Added, "a", "1")
		s.send(watch.Deleted, "a", "2")
		s.send(watch.Bookmark, "", "3")
		require.Equal(t, []string{"ADDED a/1", "ADDED a/1", "DELETED a/2", "DELETED a/2", "BOOKMARK /3"}, s.got())
		s.finish()
	})
}

func TestDroppedEventsAreDeliveredLater(t *testing.T) {
	for _, c := range []struct {
		name string
		drop string
		send []string // kind name version, or "wait"
		want []string
	}{
		{"made up for", "x", []string{"ADDED a 1", "ADDED b 2", "wait"}, []string{"ADDED b/2", "ADDED a/1"}},
		{"a later one is enough", "x", []string{"ADDED a 1", "MODIFIED a 2", "wait"}, []string{"MODIFIED a/2"}},
		{"the later one is dropped too", "xx", []string{"ADDED a 1", "DELETED a 2", "wait"}, []string{"DELETED a/2"}},
		{"no bookmark passes", "x", []string{"ADDED a 1", "BOOKMARK  2", "wait", "BOOKMARK  3"}, []string{"ADDED a/1", "BOOKMARK /3"}},
		{"nor the end of initial events", "x", []string{"ADDED a 1", "BOOKMARK end 2"}, []string{"ADDED a/1", "BOOKMARK end/2"}},
		{"nor an error", "x", []string{"ADDED a 1", "ERROR  "}, []string{"ADDED a/1", "ERROR"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			each(t, func(t *testing.T, media string) {
				s := faulty(t, media, &fault.Watch{Drop: script(c.drop), MadeUpAfter: time.Minute})
				for _, e := range c.send {
					parts := strings.Split(e, " ")
					switch parts[0] {
					case "wait":
						time.Sleep(time.Minute)
						synctest.Wait()
					case "ERROR":
						_, err := s.up.Write(wire(media, watch.Error, &metav1.Status{Code: 410, Reason: metav1.StatusReasonExpired}))
						require.NoError(t, err)
					default:
						s.send(watch.EventType(parts[0]), parts[1], parts[2])
					}
				}
				require.Equal(t, c.want, s.got())
				s.finish()
			})
		})
	}
}

func TestExemptEventsPassUnchanged(t *testing.T) {
	each(t, func(t *testing.T, media string) {
		always := func() bool { return true }
		s := faulty(t, media, &fault.Watch{
			Drop: always, Duplicate: always, MadeUpAfter: time.Hour,
			Exempt: func(namespace string) bool { return namespace == "ns" },
		})
		s.send(watch.Added, "a", "1")
		require.Equal(t, []string{"ADDED a/1"}, s.got())
		s.finish()
	})
}

// Events of exempt objects overtake those that are held back. A client that resumes from
// one of them must list.
func TestExemptEventsOvertakeOthers(t *testing.T) {
	each(t, func(t *testing.T, media string) {
		for _, faults := range []*fault.Watch{
			{Delay: func() time.Duration { return time.Minute }},
			{Stall: new(time.Duration(0)), StallLasts: time.Minute},
			{Stall: new(time.Duration(0))},
		} {
			faults.Exempt = func(namespace string) bool { return namespace == "quiet" }
			s := faulty(t, media, faults)
			exempt := func(version string) {
				o := config("b", version)
				o.Namespace = "quiet"
				_, err := s.up.Write(wire(media, watch.Modified, o))
				require.NoError(t, err)
				synctest.Wait()
			}
			exempt("1")
			require.Equal(t, []string{"MODIFIED b/1"}, s.got())
			require.True(t, s.gap.Empty())
			s.send(watch.Modified, "a", "2")
			exempt("3")
			require.Equal(t, []string{"MODIFIED b/3"}, s.got())
			require.False(t, s.gap.Covers("1"))
			require.True(t, s.gap.Covers("3"), "it has not heard of a/2")
			time.Sleep(time.Minute)
			if faults.Stall != nil && faults.StallLasts == 0 {
				require.Empty(t, s.got())
			} else {
				require.Equal(t, []string{"MODIFIED a/2"}, s.got())
				require.False(t, s.gap.Covers("2"))
			}
			s.finish()
		}
	})
}

// Events that were held back are read before any end of the watch.
func TestHeldEventsAreReadBeforeTheEnd(t *testing.T) {
	each(t, func(t *testing.T, media string) {
		for _, end := range []func(s *stream){
			func(s *stream) { require.NoError(t, s.up.Close()) },
			func(s *stream) { require.NoError(t, s.up.CloseWithError(errors.New("broken"))) },
			func(s *stream) { close(s.off) },
			func(s *stream) { _, _ = s.up.Write([]byte("]]]]]]")) },
		} {
			s := faulty(t, media, &fault.Watch{
				Delay: func() time.Duration { return time.Hour },
				Drop:  script("x"), MadeUpAfter: time.Hour,
			})
			s.send(watch.Added, "a", "1")
			time.Sleep(time.Hour)
			s.send(watch.Added, "b", "2")
			require.Empty(t, s.got())
			end(s)
			got := s.got()
			require.GreaterOrEqual(t, len(got), 2)
			require.Equal(t, []string{"ADDED a/1", "ADDED b/2"}, got[:2])
			require.True(t, s.gap.Empty())
			s.finish()
		}
	})
}

func TestEventsPassAboveTheAccount(t *testing.T) {
	each(t, func(t *testing.T, media string) {
		s := faulty(t, media, &fault.Watch{Delay: func() time.Duration { return time.Hour }})
		s.room = 2000
		for i := range 10 {
			s.send(watch.Modified, "a", fmt.Sprint(i))
			require.LessOrEqual(t, s.taken, s.room)
		}
		got := s.got()
		require.NotEmpty(t, got)
		for i, e := range got {
			require.Equal(t, fmt.Sprintf("MODIFIED a/%d", i), e)
		}
		s.finish()
	})
}

func TestUnreadableBytesPassUnchanged(t *testing.T) {
	_, err := events.New(strings.NewReader(""), events.Options{ContentType: "application/cbor-seq"})
	require.ErrorIs(t, err, filter.ErrType)
}

// The first event of a Table has the columns, which later ones omit.
func TestTableColumnsAreNotDropped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const first = `{"type":"ADDED","object":{"kind":"Table","apiVersion":"meta.k8s.io/v1","columnDefinitions":[{"name":"Name"}],"rows":[{"cells":["a"],"object":{"metadata":{"name":"a"}}}]}}` + "\n"
		const second = `{"type":"ADDED","object":{"kind":"Table","apiVersion":"meta.k8s.io/v1","columnDefinitions":null,"rows":[{"cells":["b"],"object":{"metadata":{"name":"b"}}}]}}` + "\n"
		from, to := io.Pipe()
		r, err := events.New(from, events.Options{
			Interrupt:   func() { _ = from.Close() },
			ContentType: jsonType, Gap: &events.Gap{},
			Faults: &fault.Watch{Drop: func() bool { return true }, MadeUpAfter: time.Minute},
			Still:  func() (bool, <-chan struct{}) { return true, nil },
			Take:   func(int64) bool { return true }, Give: func(int64) {},
		})
		require.NoError(t, err)
		go func() { _, _ = io.WriteString(to, first+second) }()
		p := make([]byte, 1000)
		n, err := r.Read(p)
		require.NoError(t, err)
		require.Equal(t, first, string(p[:n]))
		start := time.Now()
		n, err = r.Read(p)
		require.NoError(t, err)
		require.Equal(t, second, string(p[:n]))
		require.Equal(t, time.Minute, time.Since(start))
		require.NoError(t, r.Close())
	})
}
