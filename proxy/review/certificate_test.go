package review

import (
	"crypto/tls"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestPresentedCertificateIsTheApplications(t *testing.T) {
	var c certificate
	leaf := func(n byte) *tls.Certificate { return &tls.Certificate{Certificate: [][]byte{{n}}} }
	requireGet := func(n byte) {
		t.Helper()
		got, err := c.get(nil)
		require.NoError(t, err)
		require.Equal(t, []byte{n}, got.Certificate[0])
	}
	c.set(leaf(1))
	requireGet(1)
	require.NoError(t, c.judge([]byte{1}, false))
	c.set(leaf(2))
	requireGet(1)
	require.NoError(t, c.judge([]byte{1}, false), "the application has not read the directory again")
	requireGet(1)
	require.NoError(t, c.judge([]byte{2}, false))
	requireGet(2)
	c.set(leaf(1)) // rolled back
	requireGet(2)
	require.Len(t, c.known, 2)

	c.forget()
	_, err := c.get(nil)
	require.ErrorIs(t, err, errNone)
	_, usable := c.usableSince()
	require.False(t, usable)
	c.set(leaf(3))
	requireGet(3)
	for _, stays := range []bool{true, false} {
		require.ErrorIs(t, c.judge([]byte{2}, false), errOther, "it is of another directory")
		_, usable := c.usableSince()
		require.Equal(t, stays, usable, "the directory may have changed since it was read")
	}
	require.NoError(t, c.judge([]byte{3}, false))
	require.ErrorIs(t, c.judge([]byte{4}, false), errOther)
	c.set(leaf(4)) // the application had read the directory before the agent
	require.NoError(t, c.judge([]byte{4}, false))
	_, usable = c.usableSince()
	require.True(t, usable)
	requireGet(4)
}
