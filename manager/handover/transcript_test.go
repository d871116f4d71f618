package handover

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
	"github.com/stretchr/testify/require"

	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
)

// TestTranscripts plays testdata/*.txt, where each command is an event and is
// answered by its effects and the state after it. `-rewrite` writes them anew.
//
//	want [ready=(SHARD,...)] [restart]   with a line `SHARD SCOPE` for each; all are ready if not said
//	join SHARD POD...
//	applied POD [SERIAL [refused]]       the serial of its shard if not said; by a policy that refuses it
//	gone POD
//	refused POD SERIAL
//	outdated POD
//	ahead POD SERIAL
//	barred POD SERIAL
//	save                                 keeps the state, as a backup of etcd does
//	restore                              the state is the one saved: what was confirmed is not known any more
//	read                                 another manager reads the state as it is, likewise
//	others idle|unknown                  whether pods without a shard may act: idle at first
//	locks held|unknown                   whether pods outside the mesh may act: held at first
//	restarts [wanted=N] [down=(POD,...)] [silent=(POD,...)] [leads=(POD,...)]   who may be evicted, N members for each shard
//	show
//
// Scopes are written in sixteenths of the key space, 0 to f, and buckets and names
// that are more or less than those: `0-7 c +team-a -bucket5 +bucket1/8-f`. Ten milliseconds pass
// with each command.
func TestTranscripts(t *testing.T) { playTranscripts(t, func(_, _ State) {}) }

// playTranscripts plays the transcripts, and calls stepped with the states before and after each Step.
func playTranscripts(t *testing.T, stepped func(before, after State)) {
	datadriven.Walk(t, "testdata", func(t *testing.T, path string) {
		var s, saved State
		s.Evidence.OthersIdle, s.Evidence.LocksHeld = true, true
		now := time.UnixMilli(0)
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			now = now.Add(10 * time.Millisecond)
			switch d.Cmd {
			case "show":
				return show(s)
			case "restarts":
				return restarts(t, s, d)
			case "save":
				saved = s
				return ""
			case "restore", "read":
				if d.Cmd == "restore" {
					s = saved
				}
				s.Evidence = Evidence{OthersIdle: s.Evidence.OthersIdle, LocksHeld: s.Evidence.LocksHeld}
				return show(s)
			case "locks":
				s.Evidence.LocksHeld = d.CmdArgs[0].Key == "held"
				return show(s)
			case "others":
				s.Evidence.OthersIdle = d.CmdArgs[0].Key == "idle"
				return show(s)
			}
			next, effects := Step(s, readEvent(t, s, d), now)
			stepped(s, next)
			s = next
			return showEffects(effects) + show(s)
		})
	})
}

func readEvent(t *testing.T, s State, d *datadriven.TestData) Event {
	arg := func(i int) string {
		if i >= len(d.CmdArgs) {
			d.Fatalf(t, "%s lacks an argument", d.Cmd)
		}
		return d.CmdArgs[i].Key
	}
	serial := func(i int) int64 {
		n, err := strconv.ParseInt(arg(i), 10, 64)
		require.NoError(t, err)
		return n
	}
	switch d.Cmd {
	case "want":
		want := Want{Scopes: map[string]sharding.Scope{}, Ready: map[string]bool{}, Restart: d.HasArg("restart")}
		for line := range strings.Lines(d.Input) {
			name, text, _ := strings.Cut(strings.TrimSpace(line), " ")
			want.Scopes[name] = readScope(t, text)
			want.Ready[name] = !d.HasArg("ready")
		}
		for _, name := range list(d, "ready") {
			want.Ready[name] = true
		}
		return want
	case "join":
		var join Join
		for _, a := range d.CmdArgs[1:] {
			join.Members = append(join.Members, Member{UID: a.Key, Name: a.Key, Shard: arg(0)})
		}
		return join
	case "applied":
		if len(d.CmdArgs) == 1 {
			return Applied{UID: arg(0), Serial: s.Shards[s.Members[arg(0)].Shard].Serial}
		}
		return Applied{UID: arg(0), Serial: serial(1), Refused: d.HasArg("refused")}
	case "gone":
		return Gone{UID: arg(0)}
	case "refused":
		return Refused{UID: arg(0), Serial: serial(1)}
	case "outdated":
		return Outdated{UID: arg(0)}
	case "ahead":
		return Ahead{UID: arg(0), Serial: serial(1)}
	case "barred":
		return Barred{UID: arg(0), Serial: serial(1)}
	}
	d.Fatalf(t, "unknown command %q", d.Cmd)
	return nil
}

func restarts(t *testing.T, s State, d *datadriven.TestData) string {
	n := 1
	if d.HasArg("wanted") {
		d.ScanArgs(t, "wanted", &n)
	}
	uid := s.Restarts(n*len(s.Shards), func(m Member) bool { return m.Stale },
		func(uid string) Health {
			switch {
			case slices.Contains(list(d, "down"), uid):
				return Down
			case slices.Contains(list(d, "silent"), uid):
				return Unknown
			}
			return Up
		},
		func(uid string) bool { return slices.Contains(list(d, "leads"), uid) })
	if uid == "" {
		return "none may"
	}
	return "evict " + uid
}

func list(d *datadriven.TestData, key string) []string {
	for _, a := range d.CmdArgs {
		if a.Key == key {
			return a.Vals
		}
	}
	return nil
}

func show(s State) string {
	var b strings.Builder
	if s.MinSerial > 0 {
		fmt.Fprintf(&b, "serials from %d on", s.MinSerial)
		if s.RolledBack {
			b.WriteString(", rolled back")
		}
		b.WriteString("\n")
	}
	for _, name := range slices.Sorted(maps.Keys(s.Shards)) {
		shard := s.Shards[name]
		fmt.Fprintf(&b, "%s@%d: holds %s", name, shard.Serial, showScope(shard.Owned))
		if !shard.Owned.Equal(shard.Target) {
			fmt.Fprintf(&b, ", is to hold %s, sent %s", showScope(shard.Target), showScope(shard.Sent()))
		}
		if !shard.Wanted.Equal(shard.Target) {
			fmt.Fprintf(&b, ", wanted %s", showScope(shard.Wanted))
		}
		if !s.Evidence.Verified[name] {
			b.WriteString(", unverified")
		}
		sep := ";"
		for _, m := range slices.SortedFunc(maps.Values(s.Members), byName) {
			if m.Shard == name {
				b.WriteString(sep)
				sep = ""
				fmt.Fprintf(&b, " %s@%d", m.Name, m.Serial)
				if m.Stale {
					b.WriteString("(stale)")
				}
				if !s.Evidence.Confirmed[m.UID] {
					b.WriteString("(unconfirmed)")
				}
			}
		}
		b.WriteString("\n")
	}
	for _, m := range s.Moves {
		fmt.Fprintf(&b, "%s %s, since %d, waits for", strings.ToLower(string(m.Phase)), showMove(m), m.Since.UnixMilli())
		for _, l := range s.Laggards(m) {
			b.WriteString(" " + l.Name)
		}
		b.WriteString("\n")
	}
	return b.String()
}

func showMove(m Move) string {
	side := func(s string) string {
		if s == "" {
			return "nobody"
		}
		return s
	}
	return fmt.Sprintf("%s -> %s: %s, began %d", side(m.From), side(m.To), showScope(m.Keys), m.Began.UnixMilli())
}

func showEffects(effects []Effect) string {
	var b strings.Builder
	for _, e := range effects {
		switch e := e.(type) {
		case Resend:
			fmt.Fprintf(&b, "  resend %s\n", e.Shard)
		case Released:
			fmt.Fprintf(&b, "  released %s\n", showMove(e.Move))
		case Granted:
			fmt.Fprintf(&b, "  granted %s\n", showMove(e.Move))
		case Settled:
			fmt.Fprintf(&b, "  settled %s\n", showMove(e.Move))
		}
	}
	return b.String()
}

// What transcripts call by name.
var (
	teams   = []string{"team-a", "team-b"}
	buckets = []int{1, 5}
)

func readScope(t *testing.T, text string) sharding.Scope {
	var s sharding.Scope
	for word := range strings.FieldsSeq(text) {
		piece := readPiece(t, strings.TrimLeft(word, "+-"))
		if strings.HasPrefix(word, "-") {
			s = s.Minus(piece)
		} else {
			s = sharding.Union(s, piece)
		}
	}
	return s
}

func readPiece(t *testing.T, word string) sharding.Scope {
	if slices.Contains(teams, word) {
		return sharding.Keys(word)
	}
	if word, ok := strings.CutPrefix(word, "bucket"); ok {
		b, part, divided := strings.Cut(word, "/")
		n, err := strconv.Atoi(b)
		require.NoError(t, err)
		if !divided {
			return sharding.InBuckets(n)
		}
		return sharding.InBuckets(n).Intersect(readPiece(t, part))
	}
	first, last, ok := strings.Cut(word, "-")
	if !ok {
		last = first
	}
	lo, err := strconv.ParseUint(first, 16, 4)
	require.NoError(t, err)
	hi, err := strconv.ParseUint(last, 16, 4)
	require.NoError(t, err)
	return cells(int(lo), int(hi))
}

// showScope is what readScope reads, where it can be said so.
func showScope(s sharding.Scope) string {
	// A name is in one bucket: in others its hash is nothing.
	var odd sharding.Scope
	for _, name := range teams {
		odd = sharding.Union(odd, sharding.Keys(name))
		s = s.Minus(sharding.Keys(name).Minus(sharding.InBuckets(sharding.Bucket(name))))
	}
	names := odd
	odd = sharding.Union(odd, sharding.InBuckets(buckets...))

	words, said := sixteenths(s, sharding.All().Minus(odd))
	// Buckets and names are shown only where they differ from what is around them.
	for _, b := range buckets {
		piece := sharding.InBuckets(b).Minus(names)
		mine := s.Intersect(piece)
		if mine.Equal(said.Intersect(piece)) {
			continue
		}
		parts, _ := sixteenths(s, piece)
		said = sharding.Union(said.Minus(piece), mine)
		switch {
		case len(parts) == 0:
			words = append(words, fmt.Sprintf("-bucket%d", b))
		case parts[0] == "0-f":
			words = append(words, fmt.Sprintf("+bucket%d", b))
		default:
			for _, part := range parts {
				words = append(words, fmt.Sprintf("+bucket%d/%s", b, part))
			}
		}
	}
	for _, name := range teams {
		if s.Owns(name) && !said.Owns(name) {
			words = append(words, "+"+name)
		} else if !s.Owns(name) && said.Owns(name) {
			words = append(words, "-"+name)
		}
	}
	if s.Empty() {
		return "nothing"
	}
	return strings.Join(words, " ")
}

// sixteenths are those of the key space that s has as far as `of` goes.
func sixteenths(s, of sharding.Scope) (words []string, all sharding.Scope) {
	for first := 0; first < 16; first++ {
		last := first - 1
		for last < 15 && cells(last+1, last+1).Intersect(of).Minus(s).Empty() {
			last++
		}
		if last < first {
			continue
		}
		word := strconv.FormatInt(int64(first), 16)
		if last > first {
			word += "-" + strconv.FormatInt(int64(last), 16)
		}
		words, all = append(words, word), sharding.Union(all, cells(first, last))
		first = last
	}
	return words, all
}

func cells(first, last int) sharding.Scope {
	return sharding.Of(sharding.Range{First: uint64(first) << 60, Last: uint64(last)<<60 | (1<<60 - 1)})
}
