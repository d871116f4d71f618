package inflight

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

func TestBothWaitsForBothChannels(t *testing.T) {
	closed := make(chan struct{})
	close(closed)
	assert.Nil(t, Both(nil, closed))
	open := make(chan struct{})
	assert.Equal(t, (<-chan struct{})(open), Both(open, closed))
	assert.Equal(t, (<-chan struct{})(open), Both(nil, open))

	a, b := make(chan struct{}), make(chan struct{})
	both := Both(a, b)
	close(b)
	assert.False(t, Closed(both))
	close(a)
	assert.Eventually(t, func() bool { return Closed(both) }, 30*time.Second, time.Millisecond)
}
