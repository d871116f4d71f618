// Package limit counts a pod's requests, refuses those beyond its rules, and opens
// circuit breakers. It is pure but for locks: the time is told to it.
//
// What was counted is kept in a [Store] by the rules' keys, so that it outlives
// policies that do not touch a rule, and the agent.
package limit

import (
	"time"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
)

// Store is what the rules of one pod have counted. It is safe for concurrent use.
type Store struct{}

// NewStore is of a pod whose rules have counted nothing.
func NewStore() *Store { return &Store{} }

// States are of the rules in force, sorted by key.
func (s *Store) States() []*meshv1.RuleState { return nil }

// Export is all that a store knows, for the next agent; Import takes it. Wall-clock
// time, for the processes have none other in common.
func (s *Store) Export(now time.Time) ([]byte, error) { return nil, nil }

// Import forgets what the store knew. On an error the store is as new.
func (s *Store) Import(data []byte, now time.Time) error { return nil }

// Rules are those of one policy. They are immutable, and nil has none.
type Rules struct{}

// Compile makes rules that count in s. What s knows of other keys is forgotten
// once the rules are put in force by [Rules.Enforce].
func Compile(m *meshv1.Traffic, s *Store) (*Rules, error) { return &Rules{}, nil }

// Enforce makes these the rules that the store tells of, and forgets others.
func (r *Rules) Enforce(now time.Time) {}

// Resources are the rules that may be about requests of one kind. Nil: none is.
type Resources struct{}

// OfKind is for a plan to keep.
func (r *Rules) OfKind(k match.Kind) *Resources { return nil }

// Take decides about a request for a resource. Without a refusal the ticket must be
// done with when the answer has come.
func (r *Resources) Take(now time.Time, o *match.Object, userAgent string) (Ticket, *Refusal) {
	return Ticket{}, nil
}

// TakePath decides about a request to the apiserver for no resource.
func (r *Rules) TakePath(now time.Time, verb, path, userAgent string) (Ticket, *Refusal) {
	return Ticket{}, nil
}

// TakeHTTP decides about a request to another host, or a connection if no more is
// seen: rules that would have to see more are left out.
func (r *Rules) TakeHTTP(now time.Time, req *match.HTTP, userAgent string) (Ticket, *Refusal) {
	return Ticket{}, nil
}

// Deep tells whether a rule must see requests to a host within TLS.
func (r *Rules) Deep(host string) bool { return false }

// Ticket is of a request that is under way. The zero Ticket counts nowhere.
type Ticket struct{}

// Outcome is what became of a request.
type Outcome struct {
	// Failed: answered 5xx or 429, or not at all though the client still waited.
	Failed bool
	// Took is how long the answer was waited for; 0 for one that does not count.
	Took time.Duration
}

// Done must be called once.
func (t Ticket) Done(now time.Time, o Outcome) {}

// Refusal says which rule refused a request and why.
type Refusal struct {
	Breaker, Rule string
	// Opened: the breaker is open; else the request is beyond a limit.
	Opened bool
	// Reason is one of a few words, for metrics: "bucket", "in_flight", "backoff",
	// "opened", "forced".
	Reason string
	// RetryAfter is when to try again, at least; 0 if nobody knows.
	RetryAfter time.Duration
}
