package rules

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
)

// Host and path are matched apart, so that rules are about the hosts that they name
// and no path passes for a host.
func TestExpressionsOfHostAndPath(t *testing.T) {
	for _, tt := range []struct{ content, host, path string }{
		{`.*\.evil\.com`, `(?i).*\.evil\.com`, ``},
		{`(api|www)\.example\.com/admin/.*`, `(?i)(api|www)\.example\.com`, `/admin/.*`},
		{`api\.example\.com\/v1`, `(?i)api\.example\.com`, `/v1`},
		{`.*/b`, `(?i).*`, `/b`},
		{`evil\.com/to/http://x`, `(?i)evil\.com`, `/to/http://x`},
		{`/metrics`, ``, `/metrics`},
	} {
		r := &Renderer{}
		got := r.content(v1alpha1.ContentRegexp, tt.content, field.NewPath("contents"))
		require.Empty(t, r.Errs, tt.content)
		require.Equal(t, tt.host, got.GetHost().GetRegexp(), tt.content)
		require.Equal(t, tt.path, got.GetPath().GetRegexp(), tt.content)
	}
	for _, content := range []string{`(a|b/c)`, `[^/]*/b`, `a/(`} {
		r := &Renderer{}
		require.Nil(t, r.content(v1alpha1.ContentRegexp, content, field.NewPath("contents")), content)
		require.Len(t, r.Errs, 1, content)
		require.Contains(t, r.Errs[0].Error(), "by itself", content)
	}
}

// An expression that never matches would deny nothing, and nobody would know.
func TestExpressionsThatNoHostMatches(t *testing.T) {
	at := field.NewPath("at")
	for _, host := range []string{
		`https?:`, `evil\.com:443`, `evil\.com:\d+`, `.*:(80|443)`, `.*:.*`, `10\.0\.0\.1:443`, `evil\.com(:80|:443)`,
		`evil\.com\:443`, `good\.com|evil\.com:443`, `good\.com|gone\.com:443`, `fd00::1|evil\.com:443`, `[^:]+:443`, `cafe:443`, `cafe:(80|443)`, `cafe:\d+`, `(evil\.com:443)+`, `(evil\.com:443){1,2}`,
	} {
		r := &Renderer{}
		require.Nil(t, r.content(v1alpha1.ContentRegexp, host, at), host)
		require.Nil(t, r.content(v1alpha1.ContentRegexp, host+"/x", at), host)
		require.Nil(t, r.text(&v1alpha1.StringMatch{Regex: host}, at, true), host)
		require.Len(t, r.Errs, 3, host)
		for _, err := range r.Errs {
			require.Contains(t, err.Error(), "without scheme and port", host)
		}
	}
	r := &Renderer{}
	require.Nil(t, r.content(v1alpha1.ContentRegexp, `https?://evil\.com/.*`, at))
	require.Nil(t, r.content(v1alpha1.ContentRegexp, `https?:\/\/evil\.com`, at))
	require.Nil(t, r.text(&v1alpha1.StringMatch{Regex: `https?://evil\.com`}, at, true))
	require.Nil(t, r.text(&v1alpha1.StringMatch{Regex: `evil\.com/.*`}, at, true))
	require.Len(t, r.Errs, 4)

	for expression, host := range map[string]string{
		`Evil\.com`: "evil.com", `evil\.com(:443)?`: "evil.com", `(https?://)?evil\.com`: "evil.com", `(?:a|b)[[:digit:]]`: "b7",
		`fd00::1`: "fd00::1", `::1`: "::1", `FD00:.*`: "fd00::1", `(fd00|fe80):0*:.*`: "fe80::1", `[^:]+`: "evil.com", `a[:.]b`: "a.b",
		`(example\.com|fd00::1)`: "example.com", `example\.com|e00::1`: "e00::1", `2001:0?db8.*`: "2001:db8::1", `^2001:db8:.*$`: "2001:db8::1",
		`([0-9a-f]{0,4}:){2,7}[0-9a-f]{1,4}`: "2001:db8::1", `[0-9a-f:]+:1`: "fd00::1", `(evil\.com|fe80::1)(:443)?`: "fe80::1",
	} {
		r := &Renderer{}
		m := r.text(&v1alpha1.StringMatch{Regex: expression}, at, true)
		require.Empty(t, r.Errs, expression)
		u, err := match.NewURL(&meshv1.HttpMatch{Host: m})
		require.NoError(t, err)
		require.Equal(t, match.Yes, u.Match(&match.HTTP{Host: host}), expression)
	}
}

// Any path is no path: such rules are about https too, of which paths are not seen.
func TestAnyPathIsNone(t *testing.T) {
	at := field.NewPath("at")
	r := &Renderer{}
	for _, m := range []*meshv1.HttpMatch{
		r.url("https://evil.com/*", at),
		r.content(v1alpha1.ContentPrefix, "evil.com/", at),
		r.content(v1alpha1.ContentPrefix, "evil.com/*", at),
		r.content(v1alpha1.ContentRegexp, `evil\.com/.*`, at),
		r.content(v1alpha1.ContentRegexp, `evil\.com/.*$`, at),
		{Host: r.text(&v1alpha1.StringMatch{Exact: "evil.com"}, at, true), Path: pathOf(r.text(&v1alpha1.StringMatch{Prefix: "/"}, at, false))},
		{Host: r.text(&v1alpha1.StringMatch{Exact: "evil.com"}, at, true), Path: pathOf(r.text(&v1alpha1.StringMatch{Regex: ".*"}, at, false))},
	} {
		u, err := match.NewURL(m)
		require.NoError(t, err)
		require.Equal(t, match.Yes, u.Match(&match.HTTP{Scheme: "https", Host: "evil.com", Opaque: true}), m)
	}
	for _, m := range []*meshv1.HttpMatch{
		r.url("https://evil.com/", at),
		r.content(v1alpha1.ContentNormal, "evil.com/", at),
		r.content(v1alpha1.ContentPrefix, "evil.com/a", at),
		r.content(v1alpha1.ContentRegexp, `evil\.com/.+`, at),
		r.content(v1alpha1.ContentRegexp, `evil\.com/`, at),
	} {
		require.NotNil(t, m.Path)
	}
	require.Empty(t, r.Errs)
}

func TestCostlyExpressionsAreRefused(t *testing.T) {
	at := field.NewPath("at")
	for content, why := range map[string]string{
		`/(?:.*a){600}_`:                    "at most 1200 are permitted: repeat less, or match without an expression",
		`(?:.*a){600}_`:                     "at most 1200 are permitted: repeat less, or match without an expression",
		`/(?:.*a){250}_`:                    "at most 1048576 are permitted: repeat less, or match without an expression",
		"/" + strings.Repeat("a", 2000):     "not be longer than 2000 characters",
		strings.Repeat("a", 1997) + "/x":    "not be longer than 1996 characters",
		`(api|www)\.example\.com/v[0-9]/.*`: "",
	} {
		r := &Renderer{}
		got := r.content(v1alpha1.ContentRegexp, content, at)
		if why == "" {
			require.Empty(t, r.Errs, content)
			require.Less(t, r.Expressions, meshv1.MaxMatchSteps/50)
			continue
		}
		require.Nil(t, got, content)
		require.Len(t, r.Errs, 1, content)
		require.Contains(t, r.Errs[0].Error(), why)
	}
	r := &Renderer{}
	for range 10 {
		require.NotNil(t, r.text(&v1alpha1.StringMatch{Regex: "/(?:.*a){13}"}, at, false))
	}
	for range 5 {
		r.text(&v1alpha1.StringMatch{Regex: "/(?:.*a){13}"}, at, false)
	}
	require.ErrorContains(t, r.Errs.ToAggregate(), "with the expressions before it")
}

func TestExpressionsAboveTheBoundAreNotRead(t *testing.T) {
	const unread = "not read, because too many expressions before it"
	at := field.NewPath("at")
	t.Run("too costly", func(t *testing.T) {
		r := &Renderer{}
		for i := range 64 {
			require.Nil(t, r.content(v1alpha1.ContentRegexp, fmt.Sprintf("x/(?:.*a){290}%x", i), at))
		}
		require.Len(t, r.Errs, 64, "rules with them have no effect")
		require.ErrorContains(t, r.Errs[0], "too costly")
		for _, err := range r.Errs[1:] {
			require.ErrorContains(t, err, unread)
		}
	})
	for name, expression := range map[string]string{"invalid": "(%d", "invalid by itself": "a(%d/b)", "too large": "(?:.*a){600}_%d"} {
		t.Run(name, func(t *testing.T) {
			r := &Renderer{}
			for i := range 64 {
				require.Nil(t, r.content(v1alpha1.ContentRegexp, fmt.Sprintf(expression, i), at))
			}
			require.Len(t, r.Errs, 64)
			require.NotContains(t, r.Errs[maxUncompiled-1].Error(), unread)
			require.NotEmpty(t, r.Errs[maxUncompiled:])
			r = &Renderer{uncompiled: maxUncompiled}
			require.Nil(t, r.content(v1alpha1.ContentRegexp, "a", at))
			require.ErrorContains(t, r.Errs[0], unread)
		})
	}
	t.Run("of no host", func(t *testing.T) {
		r := &Renderer{}
		require.Nil(t, r.content(v1alpha1.ContentRegexp, `a\.b:8080`, at))
		require.Positive(t, r.Expressions, "it took as long as others")
	})
}

// Agents accept what the manager sends: both count the same steps.
func TestAgentsCountTheSameSteps(t *testing.T) {
	at, r, steps := field.NewPath("at"), &Renderer{}, 0
	for _, content := range []string{`.*\.example\.com`, `Api\.(a|b)\.com/v1/.*/x`, `/metrics`, `a\.com/.*`} {
		u, err := match.NewURL(r.content(v1alpha1.ContentRegexp, content, at))
		require.NoError(t, err)
		steps += u.Steps()
	}
	require.Equal(t, steps, r.Expressions)
	require.Positive(t, steps)
}
