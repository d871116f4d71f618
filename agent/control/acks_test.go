package control

import (
	"testing"

	"github.com/stretchr/testify/assert"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

func TestAcksOfOnePodStayInOrder(t *testing.T) {
	a := newAcks()
	over1, over2 := make(chan struct{}), make(chan struct{})
	add := func(uid, version, err string, settled <-chan struct{}) {
		a.add(t.Context(), &meshv1.Ack{Uid: uid, Version: version, Error: err}, settled)
	}
	add("a", "1", "", over1)
	add("a", "2", "no good", nil)
	add("a", "3", "no better", nil)
	add("b", "1", "", nil)
	assert.Equal(t, "b", next(t, a.out).GetUid(), "another pod's")
	assert.Empty(t, a.out)

	close(over1)
	assert.Equal(t, "1", next(t, a.out).GetVersion())
	assert.Equal(t, "3", next(t, a.out).GetVersion(), "the last error says it all")

	add("a", "4", "", over2)
	add("a", "5", "", over2)
	close(over2)
	last := next(t, a.out)
	if last.GetVersion() == "4" { // it had begun to leave
		last = next(t, a.out)
	}
	assert.Equal(t, "5", last.GetVersion())
}
