package handover_test

import (
	"fmt"
	"time"

	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/manager/handover"
)

// All keys move from shard a to shard b. They do once the pod of a has confirmed that it does
// not act on them any more.
func ExampleStep() {
	state := handover.State{Evidence: handover.Evidence{LocksHeld: true, OthersIdle: true}}
	step := func(what string, event handover.Event) {
		var effects []handover.Effect
		state, effects = handover.Step(state, event, time.Unix(1e9, 0))
		fmt.Printf("%s: a owns all is %t, b owns all is %t\n", what, state.Shards["a"].Owned.Everything(), state.Shards["b"].Owned.Everything())
		for _, effect := range effects {
			switch e := effect.(type) {
			case handover.Resend:
				fmt.Println("  send the policy of", e.Shard)
			case handover.Released:
				fmt.Println("  released by", e.Move.From)
			case handover.Granted:
				fmt.Println("  granted to", e.Move.To)
			case handover.Settled:
				fmt.Println("  settled at", e.Move.To)
			}
		}
	}
	scopes := func(a, b sharding.Scope) handover.Want {
		return handover.Want{Scopes: map[string]sharding.Scope{"a": a, "b": b}, Ready: map[string]bool{"a": true, "b": true}}
	}
	step("plan a", scopes(sharding.All(), sharding.Scope{}))
	step("join", handover.Join{Members: []handover.Member{{UID: "1", Name: "a-0", Shard: "a"}, {UID: "2", Name: "b-0", Shard: "b"}}})
	step("plan b", scopes(sharding.Scope{}, sharding.All()))
	step("ack of a-0", handover.Applied{UID: "1", Serial: state.Shards["a"].Serial})
	step("ack of b-0", handover.Applied{UID: "2", Serial: state.Shards["b"].Serial})
	// Output:
	// plan a: a owns all is true, b owns all is false
	//   granted to a
	//   settled at a
	//   send the policy of a
	//   send the policy of b
	// join: a owns all is true, b owns all is false
	//   send the policy of a
	//   send the policy of b
	// plan b: a owns all is true, b owns all is false
	//   send the policy of a
	// ack of a-0: a owns all is false, b owns all is true
	//   released by a
	//   granted to b
	//   send the policy of b
	// ack of b-0: a owns all is false, b owns all is true
	//   settled at b
}
