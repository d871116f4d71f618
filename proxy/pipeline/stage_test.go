package pipeline

import (
	"errors"
	"net/http"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stretchr/testify/require"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/metrics"
	"github.com/ctrlmesh/ctrlmesh/proxy/status"
)

// A bound of the proxy must not open a CircuitBreaker.
func TestBoundOfAResponseIsNoUpstreamError(t *testing.T) {
	p := Plan{Meters: &metrics.Meters{UpstreamErrors: prometheus.NewCounter(prometheus.CounterOpts{Name: "errors"})}}
	end := p.BadResponse("pods", status.New(http.StatusTooManyRequests, metav1.StatusReasonTooManyRequests, 1, "too much"))
	require.Equal(t, Refuse, end.Kind)
	require.Equal(t, meshv1.RefusedBound, end.Reason)
	require.Zero(t, testutil.ToFloat64(p.Meters.UpstreamErrors))

	end = p.BadResponse("pods", errors.New("not JSON"))
	require.Equal(t, Respond, end.Kind)
	require.EqualValues(t, http.StatusBadGateway, end.Status.ErrStatus.Code)
	require.EqualValues(t, 1, testutil.ToFloat64(p.Meters.UpstreamErrors))
}

func TestRefusalReasonFollowsTheStatus(t *testing.T) {
	for code, want := range map[int]meshv1.Refusal{
		http.StatusGone: meshv1.RefusedRelist, http.StatusBadRequest: meshv1.RefusedMalformed,
		http.StatusRequestEntityTooLarge: meshv1.RefusedMalformed, http.StatusUnsupportedMediaType: meshv1.RefusedMalformed,
		http.StatusTooManyRequests: meshv1.RefusedBound, http.StatusNotAcceptable: meshv1.RefusedNotAcceptable,
		http.StatusConflict: meshv1.RefusedLock,
	} {
		require.Equal(t, want, Refusal(status.New(code, metav1.StatusReasonUnknown, 0, "no")).Reason, code)
	}
}
