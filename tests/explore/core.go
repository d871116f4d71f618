package explore

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/manager/handover"
)

// core is handover.Step, with States numbered: most worlds share theirs with many
// others, and what becomes of it.
type core struct {
	options Options
	states  []handover.State
	infos   []info
	ids     map[string]int32
	known   map[call]int32
	judged  map[seen]judgement
}

type call struct {
	state int32
	what  byte
	a, b  int
}

// info is what worlds need to know of a State.
type info struct {
	held, sent [shards]uint8
	serial     [shards]int8
	members    [slots]int8 // serials
	confirmed  [slots]bool // members
	moves      int
	settled    bool // all hold what they are to hold
	disjoint   bool
	empty      bool // no shard holds anything
	minSerial  int8 // of all policies
	rolledBack bool
	// written is the number of the State as it is stored, and read anew: without evidence.
	written int32
}

// nobody stands for the serial of a pod that is no member.
const nobody = -1

func newCore(o Options) *core {
	return &core{options: o, ids: map[string]int32{}, known: map[call]int32{}, judged: map[seen]judgement{}}
}

func (c *core) get(id int32) *info { return &c.infos[id] }

// now does not pass: nothing is decided by it.
var now = time.UnixMilli(1)

func (c *core) first() int32 {
	return c.number(handover.State{Evidence: handover.Evidence{OthersIdle: true, LocksHeld: true}})
}

func (c *core) want(id int32, k int) int32 { return c.wants(id, k, 1<<shards-1) }

func (c *core) wants(id int32, k int, ready uint8) int32 {
	return c.once(call{id, 'w', k, int(ready)}, func() handover.Event {
		w := handover.Want{Scopes: map[string]sharding.Scope{}, Ready: map[string]bool{}}
		for i, keys := range c.options.Wants[k] {
			if keys != 0 {
				w.Scopes[shardName(i)] = scopes[keys]
			}
			w.Ready[shardName(i)] = ready&(1<<i) != 0
		}
		return w
	})
}

func (c *core) join(id int32, pod int, shard uint8) int32 {
	return c.once(call{id, 'j', pod, int(shard)}, func() handover.Event {
		return handover.Join{Members: []handover.Member{{UID: podName(pod), Name: podName(pod), Node: nodeName, Shard: shardName(int(shard))}}}
	})
}

func (c *core) applied(id int32, pod, serial int) int32 {
	next := c.once(call{id, 'a', pod, serial}, func() handover.Event {
		return handover.Applied{UID: podName(pod), Serial: int64(serial)}
	})
	if c.options.Flaws.EarlyGrant {
		members := c.states[id].Members
		for i := range slots {
			if i != pod && members[podName(i)].Shard == members[podName(pod)].Shard {
				next = c.once(call{next, 'a', i, serial}, func() handover.Event {
					return handover.Applied{UID: podName(i), Serial: int64(serial)}
				})
			}
		}
	}
	return next
}

func (c *core) refused(id int32, pod, serial int) int32 {
	return c.once(call{id, 'r', pod, serial}, func() handover.Event {
		return handover.Refused{UID: podName(pod), Serial: int64(serial)}
	})
}

func (c *core) gone(id int32, pod int) int32 {
	return c.once(call{id, 'g', pod, 0}, func() handover.Event {
		return handover.Gone{UID: podName(pod)}
	})
}

func (c *core) ahead(id int32, pod, serial int) int32 {
	return c.once(call{id, 'h', pod, serial}, func() handover.Event {
		return handover.Ahead{UID: podName(pod), Serial: int64(serial)}
	})
}

func (c *core) barred(id int32, pod, serial int) int32 {
	return c.once(call{id, 'b', pod, serial}, func() handover.Event {
		return handover.Barred{UID: podName(pod), Serial: int64(serial)}
	})
}

// others is a State with other evidence of the pods that are no members.
func (c *core) others(id int32, idle, locksHeld bool) int32 {
	k := call{state: id, what: 'o'}
	if idle {
		k.a = 1
	}
	if locksHeld {
		k.b = 1
	}
	next, ok := c.known[k]
	if !ok {
		s := c.states[id]
		s.Evidence.OthersIdle, s.Evidence.LocksHeld = idle, locksHeld
		next = c.number(s)
		c.known[k] = next
	}
	return next
}

// read is a State as a manager knows it that has just read it.
func (c *core) read(id int32) int32 {
	if c.options.Flaws.Trusting {
		return id
	}
	return c.get(id).written
}

// reset is the flaw SerialReset.
func (c *core) reset(id int32) int32 {
	s := c.states[id]
	s.Shards, s.Members = maps.Clone(s.Shards), maps.Clone(s.Members)
	for name, m := range s.Members {
		m.Serial -= s.Shards[m.Shard].Serial - 1 // as far behind as it was
		m.Serial = max(m.Serial, 0)
		s.Members[name] = m
	}
	for name, shard := range s.Shards {
		shard.Serial = 1
		s.Shards[name] = shard
	}
	return c.number(s)
}

func (c *core) once(k call, event func() handover.Event) int32 {
	if id, ok := c.known[k]; ok {
		return id
	}
	s, _ := handover.Step(c.states[k.state], event(), now)
	id := c.number(s)
	c.known[k] = id
	return id
}

func (c *core) number(s handover.State) int32 {
	in := info{disjoint: true, settled: true, empty: !s.Holds(), moves: len(s.Moves), minSerial: int8(s.MinSerial), rolledBack: s.RolledBack}
	var key strings.Builder
	for i := range shards {
		shard, ok := s.Shards[shardName(i)]
		in.held[i], in.sent[i], in.serial[i] = mask(shard.Owned), mask(shard.Sent()), int8(shard.Serial)
		in.settled = in.settled && shard.Owned.Equal(shard.Target)
		for j := range i {
			in.disjoint = in.disjoint && in.held[i]&in.held[j] == 0
		}
		fmt.Fprint(&key, ok, shard.Serial, in.held[i], mask(shard.Target), ";")
	}
	for i := range in.members {
		in.members[i] = nobody
		if m, ok := s.Members[podName(i)]; ok {
			in.members[i] = int8(m.Serial)
			in.confirmed[i] = s.Evidence.Confirmed[podName(i)]
			fmt.Fprint(&key, i, m.Shard, m.Serial, ";")
		}
	}
	moves := make([]string, len(s.Moves))
	for i, m := range s.Moves {
		moves[i] = fmt.Sprint(m.From, m.To, m.Phase, mask(m.Keys))
	}
	slices.Sort(moves)
	fmt.Fprint(&key, moves, s.MinSerial, s.RolledBack, s.Evidence.OthersIdle, s.Evidence.LocksHeld, s.Evidence.Acting, s.Evidence.OthersConfirmed, s.Evidence.Confirmed, s.Evidence.Verified, mask(s.Evidence.Doubtful)) // maps are printed in order

	id, ok := c.ids[key.String()]
	if !ok {
		id = int32(len(c.states))
		c.ids[key.String()] = id
		in.written = id
		c.states, c.infos = append(c.states, s), append(c.infos, in)
		if stored := s; len(s.Evidence.Confirmed)+len(s.Evidence.Verified) > 0 || s.Evidence.OthersIdle || s.Evidence.OthersConfirmed || s.Evidence.LocksHeld {
			stored.Evidence = handover.Evidence{}
			c.infos[id].written = c.number(stored)
		}
	}
	return id
}

// scopes are those of sets of ranges.
var scopes = func() (out [1 << ranges]sharding.Scope) {
	const width = 1 << 62
	for keys := range out {
		for r := range uint64(ranges) {
			if keys&(1<<r) != 0 {
				out[keys] = sharding.Union(out[keys], sharding.Of(sharding.Range{First: r * width, Last: r*width + width - 1}))
			}
		}
	}
	return out
}()

func mask(s sharding.Scope) uint8 {
	return uint8(slices.IndexFunc(scopes[:], s.Equal))
}

func shardName(i int) string  { return "s" + string(rune('0'+i)) }
func podName(i int) string    { return "p" + string(rune('0'+i)) }
func podIndex(uid string) int { return int(uid[1] - '0') }
