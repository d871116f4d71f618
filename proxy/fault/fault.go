// Package fault decides which requests of a pod are harmed and how. It is pure but
// for locks: the time is told to it, and chance follows from the rules' seeds.
package fault

import (
	"time"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
)

// Store is what the rules of one pod have decided so far. It is safe for concurrent use.
type Store struct{}

// NewStore is of a pod whose rules have decided nothing.
func NewStore() *Store { return &Store{} }

// States are of the rules in force, sorted by key.
func (s *Store) States() []*meshv1.FaultState { return nil }

// Export is all that a store knows, for the next agent; Import takes it.
func (s *Store) Export() ([]byte, error) { return nil, nil }

// Import forgets what the store knew. On an error the store is as new.
func (s *Store) Import(data []byte) error { return nil }

// Rules are those of one policy. They are immutable, and nil has none.
type Rules struct{}

// Compile makes rules that count in s.
func Compile(m *meshv1.Traffic, s *Store) (*Rules, error) { return &Rules{}, nil }

// Enforce makes these the rules that the store tells of, and forgets others.
func (r *Rules) Enforce() {}

// Resources are the rules that may be about requests of one kind. Nil: none is.
type Resources struct{}

// OfKind is for a plan to keep.
func (r *Rules) OfKind(k match.Kind) *Resources { return nil }

// Decide tells what is done to a request for a resource; nil for nothing.
func (r *Resources) Decide(now time.Time, o *match.Object) *Faults { return nil }

// DecideOther tells what is done to a request to the apiserver for no resource, which
// only rules without a match are about.
func (r *Rules) DecideOther(now time.Time) *Faults { return nil }

// DecideHTTP tells what is done to a request to another host, or a connection if no
// more is seen: rules that would have to see more are left out.
func (r *Rules) DecideHTTP(now time.Time, req *match.HTTP) *Faults { return nil }

// Deep tells whether a rule must see requests to a host within TLS.
func (r *Rules) Deep(host string) bool { return false }

// Faults are what is done to one request. Nil fields do nothing.
type Faults struct {
	// Rules that do it, as injection/rule, for the access line.
	Rules []string
	Delay time.Duration
	Abort *Abort
	// Reset is before the request is sent on, or after it was answered.
	Reset, ResetAfter bool
	// Truncate breaks the answer off after so many bytes; below 0: does not.
	Truncate int64
	// Slow is bytes a second of the answer; 0: as they come.
	Slow int64
	// Stale is how old the list is to be; 0: as it is.
	Stale time.Duration
	Watch *Watch
}

// Abort is an answer.
type Abort struct {
	Status int
	Reason string
	// Rule that says so, as injection/rule.
	Rule string
}

// Watch is what is done to a watch. Chance decides about each event.
type Watch struct {
	Gone, Cut, Stall bool
	GoneAfter        time.Duration
	CutAfter         time.Duration
	StallAfter       time.Duration
	StallLasts       time.Duration // 0: until the watch ends
	Delay            func() time.Duration
	Duplicate, Drop  func() bool
	MadeUpAfter      time.Duration
}
