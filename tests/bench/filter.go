package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"

	"golang.org/x/sync/errgroup"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/tests/stats"
)

// filtered are the lists, and the limits of the ratio of a filtered one's time to that of one that is passed, for each
// of filters. In protobuf a list begins with its length, so that none of it is sent before all of it was read: what is
// sent takes its time after that.
var filtered = []struct {
	name, accept string
	most         [3]float64
}{
	{"LIST 5,000, JSON", jsonType, [3]float64{1, 1.1, 1.1}},
	{"LIST 5,000, protobuf", protobufType, [3]float64{1, 1.3, 1.1}},
}

// filteredNamespaces have a fifth of the objects each.
var filteredNamespaces = []string{"filtered-0", "filtered-1", "filtered-2", "filtered-3", "filtered-4"}

// filters are three proxies: one that owns everything, and so passes lists unchanged, and two
// that filter them.
var filters = []struct {
	name string
	owns sharding.Scope
}{
	{"passed", sharding.All()},
	{"filtered, all stay", sharding.Keys(filteredNamespaces...)},
	{"filtered, a fifth stays", sharding.Keys(filteredNamespaces[0])},
}

// runFilter compares lists of all namespaces. The namespaces exist; the token may list all
// objects.
func runFilter(ctx context.Context, o options, token, dir string) error {
	ca, err := os.ReadFile(o.ca)
	if err != nil {
		return err
	}
	if err := seedFiltered(ctx, newClients(o.api, ca, token)); err != nil {
		return fmt.Errorf("making the objects: %w", err)
	}
	var of []variant
	for _, f := range filters {
		of = append(of, variant{f.name, []string{"-owns", strings.Join(f.owns.Strings(), ";")}})
	}
	all, err := variants(ctx, o, token, dir, of)
	if err != nil {
		return err
	}
	var wanted []row
	for _, of := range filtered {
		r := request{path: "/api/v1/configmaps", accept: of.accept}
		if err := checkFilters(ctx, all, r); err != nil {
			return fmt.Errorf("%s: %w", of.name, err)
		}
		wanted = append(wanted, row{of.name, "request", true, loop{request: r, workers: 1, atMost: listTurn}.run})
	}
	results, err := measure(ctx, o.rounds, wanted, all)
	if err != nil {
		return err
	}
	return reportFilter(os.Stdout, all, results)
}

func seedFiltered(ctx context.Context, clients []*client) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(16)
	for i := range objects {
		group.Go(func() error {
			r := request{method: http.MethodPost, path: collection(filteredNamespaces[i%len(filteredNamespaces)]), accept: jsonType}
			r.body = configMap(objectName(i), noTime, nil)
			_, err := clients[i%connections].do(ctx, r)
			return err
		})
	}
	return group.Wait()
}

// checkFilters opens all connections, and requires that the proxies filter.
func checkFilters(ctx context.Context, all []*subject, r request) error {
	var lengths []int64
	for _, s := range all {
		var n int64
		for _, c := range s.clients {
			var err error
			if n, err = c.do(ctx, r); err != nil {
				return err
			}
		}
		lengths = append(lengths, n)
	}
	whole, kept, fifth := float64(lengths[0]), float64(lengths[1]), float64(lengths[2])
	if whole < objects*800 || kept < 0.95*whole || fifth < 0.15*whole || fifth > 0.25*whole {
		return fmt.Errorf("of %.0f bytes %.0f stay and %.0f: not all and a fifth", whole, kept, fifth)
	}
	return nil
}

// reportFilter prints the table, and fails if a limit is exceeded.
func reportFilter(w io.Writer, subjects []*subject, results map[string]map[string][]sample) error {
	var missed error
	_, _ = fmt.Fprintf(w, "\n| all namespaces | | p50 ms | of the time of passing | proxy CPU us | RSS MB | limit |\n|---|---|--:|--:|--:|--:|---|\n")
	for _, r := range filtered {
		for i, s := range subjects {
			of := results[r.name][s.name]
			ratios, limit := percentile(50).ratios(of, results[r.name][subjects[0].name]), ""
			if i > 0 {
				var over bool
				if limit, over = limited(ratios, r.most[i]); over {
					missed = errors.Join(missed, fmt.Errorf("%s, %s: %.2f times as long, not within %.1f", r.name, s.name, stats.Median(ratios), r.most[i]))
				}
			}
			_, _ = fmt.Fprintf(w, "| %s | %s | %.1f | %.2f | %.0f | %s | %s |\n", r.name, s.name,
				percentile(50).of(of), stats.Median(ratios), metric(cpuEach).of(of), rss(s, of), limit)
		}
	}
	return missed
}

// filtering returns the policy of a member that owns some namespaces' ConfigMaps.
func filtering(namespace, owns string) (*meshv1.PodPolicy, error) {
	owned, err := sharding.Parse(strings.Split(owns, ";"))
	if err != nil {
		return nil, err
	}
	p := policy(namespace)
	p.Sharding.Method = meshv1.Method_METHOD_FILTER
	p.Sharding.Limits[0].Selector, p.Sharding.Limits[0].Scope = "", owned.Proto()
	return p, nil
}
