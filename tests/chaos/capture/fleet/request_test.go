package fleet

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

func TestPulseDistinguishesMeshedFromDirectRequests(t *testing.T) {
	requests, events := parsePulse([]byte(pulseLog))
	require.Len(t, requests, 3)
	require.Len(t, events, 1)
	require.Equal(t, "7", events[0].Version)
	meshed, direct, refused := requests[0], requests[1], requests[2]

	require.True(t, meshed.ViaMesh())
	require.False(t, meshed.Beyond("mine"))
	require.True(t, meshed.Beyond("other"))
	require.True(t, direct.Direct() && direct.OK() && !direct.ViaMesh())
	require.True(t, direct.Beyond("mine"))
	require.False(t, refused.OK() || refused.Direct() || refused.ViaMesh())

	start := meshed.Start
	require.Equal(t, []Request{direct, meshed}, Between(requests, start, start.Add(time.Second)), "by their ends")
	found, ok := First(requests, start, Request.OK)
	require.True(t, ok)
	require.Equal(t, direct, found)
	_, ok = First(requests, start.Add(500*time.Millisecond), Request.OK)
	require.False(t, ok)
	n, example := count(requests, func(b Request) bool { return !b.OK() })
	require.Equal(t, 1, n)
	require.Contains(t, example, "connection refused")
}
