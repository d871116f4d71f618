package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"

	"github.com/ctrlmesh/ctrlmesh/tests/stats"
)

// mostObserve limits the ratio of the proxy's CPU time per request while it counts what an observed
// pod requests to that while it does not. mostObserveEvent is for events of watches: it reads them as it does where it
// filters them.
const (
	mostObserve      = 1.02
	mostObserveEvent = 1.25
)

// observes are two proxies that pass all requests unchanged: one counts them for advice, and one does
// not, because its pod is in a shard that divides nothing.
var observes = []variant{{"uncounted", []string{"-policy", "passing"}}, {"counted", []string{"-policy", "observed"}}}

// observed returns what agents count: requests, and the events of watches.
func observed(namespace string, api *subject) []row {
	return slices.DeleteFunc(rows(namespace, api), func(r row) bool { return r.list })
}

// runObserve measures what it costs to observe a pod. Run has made the objects.
func runObserve(ctx context.Context, o options, token, dir string) error {
	ca, err := os.ReadFile(o.ca)
	if err != nil {
		return err
	}
	wanted, err := o.wanted(observed(o.namespace, &subject{clients: newClients(o.api, ca, token)}))
	if err != nil || len(wanted) == 0 {
		return err
	}
	all, err := variants(ctx, o, token, dir, observes)
	if err != nil {
		return err
	}
	results, err := measure(ctx, o.rounds, wanted, all)
	if err != nil {
		return err
	}
	return reportObserve(os.Stdout, wanted, all, results)
}

// reportObserve prints the table, and fails if the limit is exceeded.
func reportObserve(w io.Writer, rows []row, subjects []*subject, results map[string]map[string][]sample) error {
	var missed error
	_, _ = fmt.Fprintf(w, "\n| observed pod | | proxy CPU us | of uncounted | limit |\n|---|---|--:|--:|---|\n")
	for _, r := range rows {
		for i, s := range subjects {
			of := results[r.name][s.name]
			ratios, limit := metric(cpuEach).ratios(of, results[r.name][subjects[0].name]), ""
			if i > 0 {
				most, over := mostObserve, false
				if r.unit == "event" {
					most = mostObserveEvent
				}
				if limit, over = limited(ratios, most); over {
					missed = errors.Join(missed, fmt.Errorf("%s: %.3f times the CPU, not within %g", r.name, stats.Median(ratios), most))
				}
			}
			_, _ = fmt.Fprintf(w, "| %s | %s | %.1f | %.3f | %s |\n", r.name, s.name, metric(cpuEach).of(of), stats.Median(ratios), limit)
		}
	}
	return missed
}

// variant is ctrlmesh with flags of its own.
type variant struct {
	name  string
	flags []string
}

// variants starts a proxy for each. They exit with ctx, or with this process.
func variants(ctx context.Context, o options, token, dir string, of []variant) (all []*subject, err error) {
	o.cert = filepath.Join(dir, "serving.pem")
	cert, err := writeCertificate(o.cert)
	if err != nil {
		return nil, err
	}
	for _, v := range of {
		pid, addr, err := start(ctx, append(o.forProxy("mesh"), v.flags...))
		if err != nil {
			return nil, fmt.Errorf("starting a proxy: %w", err)
		}
		all = append(all, &subject{name: v.name, pid: pid, clients: newClients(addr, cert, token)})
	}
	return all, nil
}
