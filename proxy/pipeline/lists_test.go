package pipeline

import (
	"bytes"
	"slices"
	"testing"
)

func FuzzInitialEvents(f *testing.F) {
	f.Add([]byte("x"+string(EndOfInitial)+"y"), uint8(3))
	f.Fuzz(func(t *testing.T, stream []byte, piece uint8) {
		var e InitialEvents
		found := false
		for p := range slices.Chunk(stream, int(piece)+1) {
			if found = e.Passed(p); found {
				break
			}
		}
		if found != bytes.Contains(stream, EndOfInitial) {
			t.Fatalf("found: %t", found)
		}
	})
}
