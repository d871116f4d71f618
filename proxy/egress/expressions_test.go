package egress

import (
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/fault"
	"github.com/ctrlmesh/ctrlmesh/proxy/limit"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/downstream"
)

func matching(s string) *meshv1.TextMatch {
	return &meshv1.TextMatch{Kind: &meshv1.TextMatch_Regexp{Regexp: s}}
}

func TestLongPathsAreRefusedWhereExpressionsApply(t *testing.T) {
	denied := []*meshv1.HttpMatch{{Host: exactly("a"), Path: matching("/.*denied")}}
	for name, m := range map[string]*meshv1.Traffic{
		"deny":  {Breakers: []*meshv1.Breaker{{Intercepts: []*meshv1.InterceptRule{{Deny: true, Http: denied}}}}},
		"allow": {Breakers: []*meshv1.Breaker{{Intercepts: []*meshv1.InterceptRule{{Http: append(denied, &meshv1.HttpMatch{})}}}}},
		"limit": {Breakers: []*meshv1.Breaker{{Rules: []*meshv1.LimitRule{{Key: "k", Http: denied, MaxInFlight: 1}}}}},
		"fault": {Injections: []*meshv1.Injection{{Rules: []*meshv1.FaultRule{{Key: "k", Http: denied, Abort: &meshv1.Abort{Status: 500, Percent: 100}}}}}},
	} {
		t.Run(name, func(t *testing.T) {
			m.Egress = &meshv1.Egress{}
			limits, err := limit.Compile(m, limit.NewStore(), time.Now())
			require.NoError(t, err)
			faults, err := fault.Compile(m, fault.NewStore("pod"), time.Now())
			require.NoError(t, err)
			p, err := Compile(m, limits, faults)
			require.NoError(t, err)
			long := func(length int, direct *match.HTTP, hosts ...string) int {
				f := &flow{direct: direct}
				for _, h := range hosts {
					f.asked = append(f.asked, match.HTTP{Scheme: "http", Host: h, Port: 80, Method: "GET", Path: "/" + strings.Repeat("x", length-1)})
				}
				if d := p.refuses(f); d != nil {
					return d.long
				}
				return 0
			}
			require.Zero(t, long(meshv1.MaxMatchedPath, nil, "a"))
			require.Equal(t, meshv1.MaxMatchedPath, long(meshv1.MaxMatchedPath+1, nil, "a"))
			require.Zero(t, long(1<<17, nil, "b"), "no expression applies")
			require.Zero(t, long(meshv1.MaxMatchedPath/2, nil, "a", "b"))
			require.Equal(t, meshv1.MaxMatchedPath/2, long(meshv1.MaxMatchedPath/2+1, nil, "b", "a"))
			require.Equal(t, meshv1.MaxMatchedPath/2, long(meshv1.MaxMatchedPath, &match.HTTP{Host: "a"}, "a"))
		})
	}
}

func TestLongPathsAreAnswered414(t *testing.T) {
	w := newWorld(t)
	w.backend(plainAt, http.HandlerFunc(hello200))
	w.set(rules(&meshv1.Egress{}, deny(&meshv1.HttpMatch{Host: exactly("a"), Path: matching("/.*denied")})))
	at := w.redirect(plainAt)
	get := func(host string, length int, end string) string {
		return w.raw(at, fmt.Sprintf("GET /%s%s HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n", strings.Repeat("x", length-1-len(end)), end, host))
	}
	require.Regexp(t, `^HTTP/1\.1 200`, get("a", meshv1.MaxMatchedPath, ""))
	require.Regexp(t, `^HTTP/1\.1 403`, get("a", meshv1.MaxMatchedPath, "denied"))
	require.Regexp(t, `(?s)^HTTP/1\.1 414.*up to 2048 bytes: send a shorter path`, get("a", meshv1.MaxMatchedPath+1, "denied"))
	require.Regexp(t, `^HTTP/1\.1 200`, get("b", 100<<10, "denied"))
}

func TestCostlyExpressionsAreRejected(t *testing.T) {
	of := func(n int) error {
		var http []*meshv1.HttpMatch
		for range n {
			http = append(http, &meshv1.HttpMatch{Path: matching("/(?:.*a){50}_")})
		}
		_, err := Compile(rules(&meshv1.Egress{}, deny(http...)), nil, nil)
		return err
	}
	require.NoError(t, of(3))
	require.ErrorContains(t, of(4), "at most 1048576 are permitted")
	_, err := Compile(rules(&meshv1.Egress{}, deny(&meshv1.HttpMatch{Path: matching("/(?:.*a){600}_")})), nil, nil)
	require.ErrorContains(t, err, "at most 1200 are permitted: repeat less")
}

func TestFewRequestsAreMatchedByExpressionsAtOnce(t *testing.T) {
	for name, c := range map[string]struct {
		path    *meshv1.TextMatch
		matched int // while as many as may be matched are being matched
	}{
		"with expressions":    {matching("/.*denied"), 0},
		"without expressions": {exactly("/denied"), 5},
	} {
		t.Run(name, func(t *testing.T) {
			p, err := Compile(rules(&meshv1.Egress{}, deny(&meshv1.HttpMatch{Path: c.path})), nil, nil)
			require.NoError(t, err)
			synctest.Test(t, func(t *testing.T) {
				s := NewServer(Config{Conns: downstream.NewPools().Conns(func(string) {}), Log: slog.New(slog.DiscardHandler)})
				for range maxMatching {
					s.matching <- struct{}{}
				}
				var refused atomic.Int32
				for range 5 {
					go func() {
						f := &flow{asked: []match.HTTP{{Scheme: "http", Host: "a", Path: "/denied"}}}
						if (&line{s: s}).apply(p, &subject{flow: f}) != nil {
							refused.Add(1)
						}
					}()
				}
				synctest.Wait()
				require.EqualValues(t, c.matched, refused.Load())
				for range maxMatching {
					<-s.matching
				}
				synctest.Wait()
				require.EqualValues(t, 5, refused.Load())
				require.Empty(t, s.matching)
			})
		})
	}
}

// costliest returns a policy with the costliest expressions that are accepted: some for paths,
// the others for hosts.
func costliest(b *testing.B, forHosts int) *Policy {
	var of []*meshv1.HttpMatch
	for range forHosts {
		of = append(of, &meshv1.HttpMatch{Host: matching("(?i)(?:.*a){100}_")})
	}
	of = append(of, &meshv1.HttpMatch{Path: matching("/(?:.*a){20}_")})
	for {
		if _, err := Compile(rules(&meshv1.Egress{}, deny(of...)), nil, nil); err != nil {
			require.Greater(b, len(of), forHosts+1)
			p, err := Compile(rules(&meshv1.Egress{}, deny(of[:len(of)-1]...)), nil, nil)
			require.NoError(b, err)
			return p
		}
		of = append(of, of[len(of)-1])
	}
}

// BenchmarkCostliest decides about a request with the longest path and a new host.
func BenchmarkCostliest(b *testing.B) {
	for _, hosts := range []int{0, 10} {
		for _, targets := range []int{1, 1 + maxVia} {
			b.Run(fmt.Sprintf("%d hosts %d targets", hosts, targets), func(b *testing.B) {
				p, n := costliest(b, hosts), 0
				path := "/" + strings.Repeat("a", meshv1.MaxMatchedPath/targets-1)
				for b.Loop() {
					f := &flow{}
					for range targets {
						n++
						host := fmt.Sprintf("%d.%s", n, strings.Repeat("a", 240))
						f.asked = append(f.asked, match.HTTP{Scheme: "http", Host: host, Port: 80, Method: "GET", Path: path})
					}
					if p.refuses(f) != nil {
						b.Fatal("refused")
					}
				}
			})
		}
	}
}
