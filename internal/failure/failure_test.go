package failure

import (
	"io"
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestWrapNamesTheFailedOperation(t *testing.T) {
	assert.NoError(t, Wrap(nil, "reading pod %s", "a"))
	err := Wrap(io.EOF, "reading pod %s", "a")
	assert.ErrorIs(t, err, io.EOF)
	assert.EqualError(t, err, "reading pod a: EOF")
}
