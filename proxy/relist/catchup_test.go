package relist

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// dividing is a policy that is about some keys.
type dividing string

func (p dividing) Affects(Policy, Resource) bool { return false }
func (p dividing) Redivides(next Policy) bool    { return p != next }
func (p dividing) KeepsCaches() bool             { return false }
func (p dividing) PassesThrough() bool           { return false }
func (p dividing) DropsEvents(Resource) bool     { return false }

// Otherwise each write would lock the ledger for as long as a catch-up may last.
func TestChangeOfOtherRulesBeginsNoCatchUp(t *testing.T) {
	for name, c := range map[string]struct {
		next  dividing
		going bool
	}{"same keys": {"a", false}, "other keys": {"b", true}} {
		t.Run(name, func(t *testing.T) {
			l := NewLedger()
			l.Change(dividing("a"), time.Now(), func() {})
			l.Change(c.next, time.Now(), func() {})
			require.Equal(t, c.going, l.catchUp.going.Load())
		})
	}
}
