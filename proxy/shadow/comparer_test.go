package shadow

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// object is an object of the tests, by the JSON of its fields besides the metadata.
func object(t require.TestingT, version int, fields string) *Object {
	meta := fmt.Sprintf(`"uid":"u","resourceVersion":"%d"`, version)
	if version == 0 { // it is to be created
		meta = `"uid":"other"`
	}
	raw := fmt.Sprintf(`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"a",%s}%s}`, meta, fields)
	o, err := Parse([]byte(raw), nil)
	require.NoError(t, err)
	return o
}

// world is an object that others change, and a shadow's comparer.
type world struct {
	*testing.T
	Comparer
	mu  sync.Mutex
	now *Object
	err error
}

func (w *world) set(o *Object, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.now, w.err = o, err
}

// write compares a write of the object, as if it had one of several paths.
func (w *world) write(verb string, after *Object, path ...string) {
	w.Compare(w.Context(), &Write{
		Verb: verb, Resource: "configmaps", Path: strings.Join(path, "/"), After: after, Window: 30 * time.Second, Count: func(Result) {},
		Read: func(context.Context) (*Object, error) {
			w.mu.Lock()
			defer w.mu.Unlock()
			return w.now, w.err
		},
	})
	synctest.Wait()
}

// pass lets time pass.
func (w *world) pass(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// ended returns how many writes have ended in each way.
func (w *world) ended() string {
	r := w.Report()
	return fmt.Sprintf("%d agreed, %d differed, %d uncompared", r.GetAgreed(), r.GetDiffered(), r.GetUncompared())
}

// paths returns the paths of the fields that differed.
func (w *world) paths() (out []string) {
	for _, d := range w.Report().GetDifferences() {
		out = append(out, d.GetFields()...)
	}
	return out
}

func TestWritesAreComparedWithThoseOfOthers(t *testing.T) {
	is, wanted := `,"data":{"a":"1"}`, `,"data":{"a":"2"}`
	for name, c := range map[string]struct {
		verb   string
		before string // fields when the shadow writes; "": there is no object
		after  string // fields by the dry run
		then   string // fields that others write; "-": they delete it
		want   string
		paths  []string
	}{
		"the same change":             {"update", is, wanted, wanted, "1 agreed, 0 differed, 0 uncompared", nil},
		"no change":                   {"update", is, is, is, "1 agreed, 0 differed, 0 uncompared", nil},
		"another change, too":         {"patch", is, wanted, `,"data":{"a":"2","b":"3"}`, "1 agreed, 0 differed, 0 uncompared", nil},
		"nobody changes it":           {"update", is, wanted, is, "0 agreed, 1 differed, 0 uncompared", []string{"data.a"}},
		"another value":               {"update", is, wanted, `,"data":{"a":"3"}`, "0 agreed, 1 differed, 0 uncompared", []string{"data.a"}},
		"a field is removed":          {"update", `,"data":{"a":"1","b":"2"}`, is, is, "1 agreed, 0 differed, 0 uncompared", nil},
		"a field remains":             {"update", `,"data":{"a":"1","b":"2"}`, is, `,"data":{"a":"1","b":"2"}`, "0 agreed, 1 differed, 0 uncompared", []string{"data.b"}},
		"others delete it":            {"update", is, wanted, "-", "0 agreed, 0 differed, 1 uncompared", nil},
		"creation by apply":           {"patch", "", wanted, wanted, "1 agreed, 0 differed, 0 uncompared", nil},
		"creation":                    {"create", "", wanted, wanted, "1 agreed, 0 differed, 0 uncompared", nil},
		"nobody creates it":           {"create", "", wanted, "", "0 agreed, 1 differed, 0 uncompared", nil},
		"created otherwise":           {"create", "", wanted, is, "0 agreed, 1 differed, 0 uncompared", []string{"data.a"}},
		"deletion":                    {"delete", is, "", "-", "1 agreed, 0 differed, 0 uncompared", nil},
		"nobody deletes it":           {"delete", is, "", is, "0 agreed, 1 differed, 0 uncompared", nil},
		"times within the window":     {"update", is, `,"data":{"a":"2026-01-02T03:04:05Z"}`, `,"data":{"a":"2026-01-02T03:04:25Z"}`, "1 agreed, 0 differed, 0 uncompared", nil},
		"times not within the window": {"update", is, `,"data":{"a":"2026-01-02T03:04:05Z"}`, `,"data":{"a":"2026-01-02T03:05:05Z"}`, "0 agreed, 1 differed, 0 uncompared", []string{"data.a"}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := &world{T: t}
				if c.before != "" {
					w.set(object(t, 1, c.before), nil)
				}
				var after *Object
				switch {
				case c.after != "" && c.before == "":
					after = object(t, 0, c.after)
				case c.after != "":
					after = object(t, 1, c.after)
				}
				w.write(c.verb, after)
				w.pass(time.Second)
				switch c.then {
				case "", "-":
					w.set(nil, nil)
				default:
					w.set(object(t, 2, c.then), nil)
				}
				w.pass(30 * time.Second)
				require.Equal(t, c.want, w.ended())
				require.Equal(t, c.paths, w.paths())
			})
		})
	}
}

func TestDeletedAgainDuringTheWindow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &world{T: t}
		w.set(object(t, 1, ""), nil)
		w.write("delete", nil)
		w.pass(29 * time.Second)
		require.Equal(t, "0 agreed, 0 differed, 0 uncompared", w.ended(), "others have time")
		w.set(nil, nil)
		w.pass(time.Second)
		require.Equal(t, "1 agreed, 0 differed, 0 uncompared", w.ended())
	})
}

func TestObjectChangedRightAfterTheWriteIsUncompared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &world{T: t}
		w.set(object(t, 2, `,"data":{"a":"3"}`), nil)
		w.write("update", object(t, 1, `,"data":{"a":"2"}`))
		require.Equal(t, "0 agreed, 0 differed, 1 uncompared", w.ended(), "what it was before is not known")
		w.write("update", object(t, 1, `,"data":{"a":"3"}`))
		require.Equal(t, "1 agreed, 0 differed, 1 uncompared", w.ended(), "whatever it was before")
	})
}

// Others change the object each second, and at times between a write and the read after it.
func TestDifferenceOfABusyObjectIsFound(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &world{T: t}
		version := 0
		for range 62 {
			version += 2
			before := version
			if version%10 == 0 {
				before-- // others have changed it since
			}
			w.set(object(t, version, fmt.Sprintf(`,"data":{"n":"%d"}`, version)), nil)
			w.write("update", object(t, before, fmt.Sprintf(`,"data":{"n":"%d","mine":"%d"}`, version+2, version)))
			w.pass(time.Second)
		}
		require.Equal(t, []string{"data.mine"}, w.paths())
		require.EqualValues(t, 2, w.Report().GetDiffered(), "once in each window")
	})
}

func TestEachFieldHasAWindowOfItsOwn(t *testing.T) {
	is := `,"data":{"a":"1","b":"1"}`
	for verb, want := range map[string][]string{"patch": {"data.a", "data.b"}, "update": {"data.b"}} {
		t.Run(verb, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := &world{T: t}
				w.set(object(t, 1, is), nil)
				w.write(verb, object(t, 1, `,"data":{"a":"2","b":"1"}`))
				w.pass(20 * time.Second)
				w.write(verb, object(t, 1, `,"data":{"a":"1","b":"2"}`))
				w.pass(29 * time.Second)
				require.Equal(t, want[:len(want)-1], append([]string{}, w.paths()...), "an update wants each field as it has it")
				w.pass(time.Second)
				require.Equal(t, want, w.paths())
				require.Zero(t, w.held)
			})
		})
	}
}

// Others have set what the shadow wanted, and have gone on since the object was read last.
func TestEarlierValuesOfACounterAreRemembered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &world{T: t}
		n := func(i int) string { return fmt.Sprintf(`,"data":{"n":"%d"}`, i) }
		w.set(object(t, 1, n(1)), nil)
		for i := range 5 {
			w.write("update", object(t, 1, n(2+i)))
		}
		w.set(object(t, 2, n(5)), nil)
		w.pass(maxInterval)
		require.Equal(t, "1 agreed, 0 differed, 0 uncompared", w.ended())
	})
}

func TestObjectCreatedAnewWasDeleted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &world{T: t}
		w.set(object(t, 1, ""), nil)
		w.write("delete", nil)
		another := object(t, 2, "")
		another.UID = "another"
		w.set(another, nil)
		w.pass(time.Second)
		require.Equal(t, "1 agreed, 0 differed, 0 uncompared", w.ended())
	})
}

func TestReadsMayFailForAWhile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &world{T: t}
		w.set(object(t, 1, `,"data":{"a":"1"}`), nil)
		w.write("update", object(t, 1, `,"data":{"a":"2"}`))
		w.set(nil, errors.New("no answer"))
		w.pass(20 * time.Second)
		w.set(object(t, 2, `,"data":{"a":"2"}`), nil)
		w.pass(10 * time.Second)
		require.Equal(t, "1 agreed, 0 differed, 0 uncompared", w.ended())

		w.set(nil, errors.New("forbidden"))
		w.write("update", object(t, 1, `,"data":{"a":"3"}`))
		require.Equal(t, "1 agreed, 0 differed, 1 uncompared", w.ended())
	})
}

func TestPendingWritesAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &world{T: t}
		w.set(object(t, 1, ""), nil)
		for i := range maxPending + 10 {
			w.write("delete", nil, fmt.Sprint(i))
		}
		w.set(nil, nil)
		w.pass(30 * time.Second)
		require.Equal(t, fmt.Sprintf("%d agreed, 0 differed, 10 uncompared", maxPending), w.ended())
		require.Zero(t, w.held)
		require.Empty(t, w.pending)
	})
}
