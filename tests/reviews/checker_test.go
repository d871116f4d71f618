package reviews

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	v2 "github.com/ctrlmesh/ctrlmesh/tests/operators/reviewer/v2"
)

var start = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

func at(seconds int) time.Time { return start.Add(time.Duration(seconds) * time.Second) }

// outcome returns a create in namespace a from one second to the next.
func outcome(second int, mutated, validated string, err error) Outcome {
	return Outcome{Start: at(second), End: at(second + 1), Namespace: "a", Mutated: v2.Reviewer{Version: mutated}, Validated: v2.Reviewer{Version: validated}, Err: err}
}

func TestOutcomesAreJudgedByTheOwner(t *testing.T) {
	refused := errors.New("refused")
	other := outcome(21, Next, Next, nil)
	other.Namespace = "b"
	for name, c := range map[string]struct {
		outcome Outcome
		want    Verdict // without the reviews
	}{
		"by the first owner":              {outcome(1, Next, Next, nil), Verdict{Checked: 1}},
		"by the second owner":             {outcome(21, Stable, Stable, nil), Verdict{Checked: 1}},
		"mutated by the last owner":       {outcome(21, Next, Stable, nil), Verdict{Checked: 1, Misrouted: 1}},
		"validated by the next owner":     {outcome(1, Next, Stable, nil), Verdict{Checked: 1, Misrouted: 1}},
		"mutated by nobody":               {outcome(1, "", Next, nil), Verdict{Checked: 1, Misrouted: 1}},
		"during the handover":             {outcome(15, Stable, Next, nil), Verdict{}},
		"into the handover":               {outcome(9, Stable, Next, nil), Verdict{Checked: 1, Misrouted: 1}},
		"beyond the begin of a handover":  {Outcome{Start: at(9), End: at(11), Namespace: "a", Mutated: v2.Reviewer{Version: Stable}}, Verdict{}},
		"in a namespace without an owner": {other, Verdict{}},
		"without an agent":                {outcome(31, Next, Next, nil), Verdict{}},
		"failed":                          {outcome(1, "", "", refused), Verdict{Failed: 1}},
		"failed without an agent":         {outcome(33, "", "", refused), Verdict{Failed: 1}},
		"failed with the killed agent":    {outcome(30, "", "", refused), Verdict{Cut: 1}},
		"failed soon after":               {Outcome{Start: at(30), End: at(32), Namespace: "a", Err: refused}, Verdict{Cut: 1}},
		"failed on a closed connection":   {Outcome{Start: at(31).Add(time.Second / 2), End: at(32), Namespace: "a", Err: refused}, Verdict{Cut: 1}},
		"failed by a timeout":             {Outcome{Start: at(30), End: at(37), Namespace: "a", Err: refused}, Verdict{Failed: 1}},
	} {
		t.Run(name, func(t *testing.T) {
			j := &Checker{
				Tenures: []Tenure{{"a", Next, at(0), at(10)}, {"a", Stable, at(20), time.Time{}}},
				Away:    []Window{{at(30), at(40)}}, Dying: []Window{{at(30), at(31)}},
			}
			got := j.Check([]Outcome{c.outcome})
			require.Equal(t, got.Misrouted+got.Failed, len(got.Findings))
			got.Findings, c.want.Reviews = nil, PerCreate
			require.Equal(t, c.want, got)
		})
	}
}

func TestCertificatesAreVerifiedByTheBundle(t *testing.T) {
	a, err := newAuthority()
	require.NoError(t, err)
	for serial := int64(2); serial < 4; serial++ {
		cert, key, err := a.issue("reviewer.ns.svc")
		require.NoError(t, err)
		pair, err := tls.X509KeyPair(cert, key)
		require.NoError(t, err)
		pool := x509.NewCertPool()
		require.True(t, pool.AppendCertsFromPEM(a.bundle()))
		_, err = pair.Leaf.Verify(x509.VerifyOptions{DNSName: "reviewer.ns.svc", Roots: pool})
		require.NoError(t, err)
		require.Equal(t, serial, pair.Leaf.SerialNumber.Int64())
	}
}

func TestInterruptionsOfAllPodsAreAwaited(t *testing.T) {
	before := map[string]float64{"a": 0, "b": 2}
	require.Error(t, interrupted(before, map[string]float64{"a": 1, "b": 2}))
	require.Error(t, interrupted(before, map[string]float64{"b": 3}))
	require.NoError(t, interrupted(before, map[string]float64{"a": 1, "b": 3}))
}
