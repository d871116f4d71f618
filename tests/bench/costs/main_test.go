package main

import (
	"io"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const printed = `goos: linux
BenchmarkConnect-2   	      50	     13069 plain-ns	     14191 redirected-ns	     14582 redirected-open-ns	 1.300 redirected-open-ratio	 1.085 redirected-ratio
BenchmarkConnect-2   	      50	     13069 plain-ns	     14191 redirected-ns	     14582 redirected-open-ns	 1.100 redirected-open-ratio	 1.095 redirected-ratio
BenchmarkConnect-2   	      50	     13069 plain-ns	     14191 redirected-ns	     14582 redirected-open-ns	 1.120 redirected-open-ratio	 1.085 redirected-ratio
BenchmarkCapture/ebpf/first-2         	      30	   4129113 ns/op	         0 children-ms/op	         0.7000 own-ms/op
BenchmarkCapture/iptables-nft/again-2 	      30	  11228639 ns/op	         6.621 children-ms/op	         2.868 own-ms/op
BenchmarkCheck/ebpf-2 	      30	  2.5 %core
PASS
`

func TestMediansAboveLimitsFail(t *testing.T) {
	for name, c := range map[string]struct {
		printed string
		missed  []string
	}{
		"one round over it is no miss": {printed, nil},
		"a connect that is too slow": {strings.ReplaceAll(printed, "1.085 redirected-ratio", "1.260 redirected-ratio"),
			[]string{"connect, redirected: 1.26, not under 1.25"}},
		"a capture that is too dear": {strings.ReplaceAll(printed, "2.868 own-ms/op", "5.000 own-ms/op"),
			[]string{"capture, iptables-nft/again: 5.00, not under 5.00"}},
		"nothing measured": {"PASS\n", []string{"connect, redirected: 0.00, not under 1.25",
			"connect, redirected, fail-open: 0.00, not under 1.25", "capture: not measured"}},
	} {
		t.Run(name, func(t *testing.T) {
			measured, err := read(strings.NewReader(c.printed))
			require.NoError(t, err)
			require.Equal(t, c.missed, report(io.Discard, measured))
		})
	}
}

func TestUnexpectedResultsFail(t *testing.T) {
	_, err := read(strings.NewReader("BenchmarkConnect-2 50 some ns/op\n"))
	require.Error(t, err)
}
