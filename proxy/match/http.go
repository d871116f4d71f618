package match

import (
	"fmt"
	"slices"
	"strings"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/expression"
)

// HTTP is a request to a host other than the apiserver, or what is seen of it.
type HTTP struct {
	Scheme string // "http" or "https"
	// Host in lower case, without a port; empty if it is not seen.
	Host string
	Port uint16
	// Opaque means TLS that is not decrypted, so that the fields below are not seen.
	Opaque bool
	Method string
	Path   string
	Header map[string][]string // as in net/http
}

// Verdict is the result of a match.
type Verdict int

// Verdicts of URL.Match.
const (
	No Verdict = iota
	Yes
	// Unseen means that the request may match, depending on what is not seen.
	Unseen
)

// URL is a compiled HttpMatch.
type URL struct {
	scheme     string
	host, path *text
	port       uint16
	methods    set
	headers    Headers
}

// NewURL compiles a match.
func NewURL(m *meshv1.HttpMatch) (*URL, error) {
	out := &URL{scheme: m.GetScheme(), port: uint16(m.GetPort()), methods: newSet(m.GetMethods())}
	var err error
	if out.host, err = newText(m.GetHost()); err != nil {
		return nil, fmt.Errorf("host: %w", err)
	}
	if out.path, err = newText(m.GetPath()); err != nil {
		return nil, fmt.Errorf("path: %w", err)
	}
	out.headers, err = NewHeaders(m.GetHeaders())
	return out, err
}

// Deep reports whether the match needs more than is seen of opaque TLS.
func (u *URL) Deep() bool {
	return u.path != nil || !u.methods.all() || len(u.headers) > 0
}

// Wildcards returns the number of conditions that match anything, as for Resource.
func (u *URL) Wildcards() int {
	return trues(u.scheme == "", u.host == nil || !u.host.exact, u.port == 0, u.path == nil || !u.path.exact, u.methods.all())
}

// PathExpression reports whether the match has a regular expression for paths.
func (u *URL) PathExpression() bool { return u.path != nil && u.path.expression != nil }

// Steps returns how many instructions the expressions run at most for one request.
func (u *URL) Steps() (n int) {
	if u.host != nil && u.host.expression != nil {
		n += u.host.expression.HostSteps
	}
	if u.PathExpression() {
		n += u.path.expression.PathSteps
	}
	return n
}

// Match reports whether r matches, or Unseen if that is not known.
func (u *URL) Match(r *HTTP) Verdict { return u.MatchFound(r, false) }

// MatchFound is Match for a match that [Hosts.Of] returned together with sure, so that the
// expression for hosts runs once.
func (u *URL) MatchFound(r *HTTP, sure bool) Verdict {
	switch {
	case u.scheme != "" && u.scheme != r.Scheme, u.port != 0 && u.port != r.Port:
		return No
	case u.host != nil && r.Host == "":
		return Unseen
	case u.host != nil && !sure && !u.host.match(r.Host):
		return No
	case !u.Deep():
		return Yes
	case r.Opaque:
		return Unseen
	case !u.methods.has(r.Method), !u.headers.Match(r.Header), u.path != nil && !u.path.match(r.Path):
		return No
	}
	return Yes
}

// HostIs reports whether the match includes a host, so that requests to the host may
// match.
func (u *URL) HostIs(host string) bool { return u.host == nil || u.host.match(host) }

// text is a compiled TextMatch: exact, a regular expression, or else a prefix or a suffix.
type text struct {
	exact      bool
	expression *expression.Whole // nil: it is none
	match      func(string) bool
}

func newText(m *meshv1.TextMatch) (*text, error) {
	switch k := m.GetKind().(type) {
	case nil:
		return nil, nil
	case *meshv1.TextMatch_Exact:
		return &text{exact: true, match: func(s string) bool { return s == k.Exact }}, nil
	case *meshv1.TextMatch_Prefix:
		return &text{match: func(s string) bool { return strings.HasPrefix(s, k.Prefix) }}, nil
	case *meshv1.TextMatch_Suffix:
		return &text{match: func(s string) bool { return strings.HasSuffix(s, k.Suffix) }}, nil
	case *meshv1.TextMatch_Regexp:
		re, err := expression.CompileWhole(k.Regexp)
		if err != nil {
			return nil, err
		}
		return &text{expression: re, match: re.MatchString}, nil
	default:
		return nil, fmt.Errorf("unknown match %T", k)
	}
}

// Patterns are exact strings, or prefixes followed by "*".
type Patterns []string

// Match reports whether s matches one of the patterns. Empty Patterns match anything.
func (p Patterns) Match(s string) bool {
	return len(p) == 0 || slices.ContainsFunc(p, func(pattern string) bool {
		if start, ok := strings.CutSuffix(pattern, "*"); ok {
			return strings.HasPrefix(s, start)
		}
		return s == pattern
	})
}
