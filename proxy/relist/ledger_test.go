package relist

import (
	"testing"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// Clients can invent any number of views. After a while others can miss events again.
func TestFullLedgerForgetsOldGaps(t *testing.T) {
	l := NewLedger()
	enter := func(v uint64) *Ticket {
		ticket := l.Enter(nil, Resource{GroupResource: schema.GroupResource{Resource: "configmaps"}}, View{path: v}, nil)
		require.NotNil(t, ticket)
		return ticket
	}
	missing := func(v uint64) *Gap {
		ticket := enter(v)
		g := ticket.Gap()
		if g != nil {
			g.Cover("5")
			ticket.End(g)
		}
		return g
	}
	for v := range uint64(l.Bounds.Gaps) {
		require.NotNil(t, missing(v))
	}
	full := uint64(l.Bounds.Gaps)
	require.Nil(t, missing(full))
	require.True(t, enter(7).Missed("5"))
	l.Age(ResumeWithin)
	require.NotNil(t, missing(full))
	_, gaps := l.Remembered()
	require.Equal(t, 1, gaps)
}
