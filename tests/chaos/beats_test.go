package main

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

const pulseLog = `2026-11-20T10:00:00.1Z stdout F {"start":"2026-11-20T10:00:00Z","ms":100,"kind":"fresh","code":200,"issuers":["CN=ctrlmesh,O=ctrlmesh"],"namespaces":["mine"]}
2026-11-20T10:00:00.2Z stdout F {"time":"2026-11-20T10:00:00.2Z","object":"mine/here","version":"7"}
2026-11-20T10:00:00.3Z stderr F panic: {
2026-11-20T10:00:00.4Z stdout F {"start":"2026-11-20T10:00:00.05Z","ms":10.5,"kind":"http2","code":200,"issuers":["CN=ctrlmesh,O=ctrlmesh","CN=kubernetes-ca"],"namespaces":["mine","other"]}
2026-11-20T10:00:01Z stdout F {"start":"2026-11-20T10:00:01Z","ms":1,"kind":"write","error":"connection refused"}
`

func TestPulse(t *testing.T) {
	beats, changes := parsePulse([]byte(pulseLog))
	require.Len(t, beats, 3)
	require.Len(t, changes, 1)
	require.Equal(t, "7", changes[0].Version)
	meshed, direct, refused := beats[0], beats[1], beats[2]

	require.True(t, meshed.meshed())
	require.False(t, meshed.wide("mine"))
	require.True(t, meshed.wide("other"))
	require.True(t, direct.direct() && direct.good() && !direct.meshed())
	require.True(t, direct.wide("mine"))
	require.False(t, refused.good() || refused.direct() || refused.meshed())

	start := meshed.Start
	require.Equal(t, []beat{direct, meshed}, stretch(beats, start, start.Add(time.Second)), "by their ends")
	found, ok := first(beats, start, beat.good)
	require.True(t, ok)
	require.Equal(t, direct, found)
	_, ok = first(beats, start.Add(500*time.Millisecond), beat.good)
	require.False(t, ok)
	n, example := count(beats, func(b beat) bool { return !b.good() })
	require.Equal(t, 1, n)
	require.Contains(t, example, "connection refused")
}
