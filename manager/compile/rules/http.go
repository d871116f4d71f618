package rules

import (
	"net/netip"
	"regexp"
	"regexp/syntax"
	"slices"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/internal/expression"
)

var (
	hostname  = regexp.MustCompile(`^[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?$`)
	hostStart = regexp.MustCompile(`^([a-z0-9_.-]*|[0-9a-f:]*:[0-9a-f:.]*)$`)
)

// url parses [scheme://]host[:port][/path]; it returns nil if s is invalid.
func (r *Renderer) url(s string, path *field.Path) *meshv1.HttpMatch {
	scheme, rest, ok := strings.Cut(s, "://")
	if !ok {
		scheme, rest = "", s
	} else if scheme = strings.ToLower(scheme); scheme != "http" && scheme != "https" {
		r.invalid(path, s, "the scheme must be http or https, or left out for both")
		return nil
	}
	out, pattern, ok := r.authority(rest, s, path)
	if !ok {
		return nil
	}
	out.Scheme = scheme
	switch start, prefix := strings.CutSuffix(pattern, "*"); {
	case strings.Contains(start, "*"):
		r.invalid(path, s, `a path may have "*" at its end alone`)
		return nil
	case prefix:
		out.Path = pathOf(&meshv1.TextMatch{Kind: &meshv1.TextMatch_Prefix{Prefix: start}})
	case pattern != "":
		out.Path = &meshv1.TextMatch{Kind: &meshv1.TextMatch_Exact{Exact: pattern}}
	}
	return out
}

// hostAndPath parses a regular expression for the host and, from the first "/" on, for the
// path. They are matched separately, so that a path that looks like a host does not match
// as one.
func (r *Renderer) hostAndPath(s string, at *field.Path) *meshv1.HttpMatch {
	host, path, deep := strings.Cut(s, "/")
	if deep {
		path = "/" + path
		if n := len(host) - len(strings.TrimRight(host, `\`)); n%2 == 1 { // `\/` is a "/"
			host = host[:len(host)-1]
		}
		for _, part := range []string{host, path} {
			if _, err := syntax.Parse(part, syntax.Perl); err != nil {
				r.uncompiled++
				r.invalid(at, s, `what is before the first "/" is about the host alone, what follows about the path alone, and %q is no expression of RE2 by itself: %v`, part, err)
				return nil
			}
		}
	}
	out := &meshv1.HttpMatch{}
	if host != "" {
		if out.Host = r.hostExpression(host, at); out.Host == nil {
			return nil
		}
	}
	if path != "" {
		before := len(r.Errs)
		if out.Path = r.pathExpression(path, at); len(r.Errs) > before {
			return nil
		}
	}
	return out
}

// pathOf returns m, or nil if m matches any path: then https need not be decrypted for it.
func pathOf(m *meshv1.TextMatch) *meshv1.TextMatch {
	if m.GetPrefix() == "/" || slices.Contains([]string{".*", "/.*", "/(.*)"}, strings.TrimSuffix(m.GetRegexp(), "$")) {
		return nil
	}
	return m
}

// hostExpression parses a case-insensitive expression for a host. It returns nil if the
// expression is invalid, or if it or one of its alternatives cannot match any host.
func (r *Renderer) hostExpression(s string, path *field.Path) *meshv1.TextMatch {
	compiled := r.expression(ignoreCase, s, path)
	if compiled == nil {
		return nil
	}
	if !r.takes(compiled.HostSteps, s, path) {
		return nil
	}
	if re, err := syntax.Parse(s, syntax.Perl); err == nil && hostless(re) {
		r.invalid(path, s, "hosts are matched without scheme and port, so that this never matches: leave those out (an IPv6 address stands by itself, without brackets)")
		return nil
	}
	return &meshv1.TextMatch{Kind: &meshv1.TextMatch_Regexp{Regexp: ignoreCase + s}}
}

// content parses one of the contents of an intercept rule; it returns nil if s is invalid.
func (r *Renderer) content(kind v1alpha1.ContentType, s string, path *field.Path) *meshv1.HttpMatch {
	if kind == v1alpha1.ContentRegexp {
		return r.hostAndPath(s, path)
	}
	if strings.Contains(s, "://") {
		r.invalid(path, s, "write host[:port][/path], without a scheme: rules apply to both http and https")
		return nil
	}
	out, text, ok := r.authority(s, s, path)
	if !ok {
		return nil
	}
	if kind == v1alpha1.ContentPrefix {
		text = strings.TrimSuffix(text, "*") // the user means the prefix
	}
	switch {
	case strings.Contains(text, "*"):
		r.invalid(path, s, `a path is read as it is written: leave out the "*" and choose contentType Prefix, or Regexp`)
		return nil
	case text == "":
	case kind == v1alpha1.ContentPrefix:
		out.Path = pathOf(&meshv1.TextMatch{Kind: &meshv1.TextMatch_Prefix{Prefix: text}})
	default:
		out.Path = &meshv1.TextMatch{Kind: &meshv1.TextMatch_Exact{Exact: text}}
	}
	return out
}

// authority parses host[:port] and returns the rest, a path that begins with "/" or is
// empty.
func (r *Renderer) authority(rest, whole string, path *field.Path) (out *meshv1.HttpMatch, tail string, ok bool) {
	out = &meshv1.HttpMatch{}
	if strings.ContainsAny(rest, "?#") {
		r.invalid(path, whole, "queries and fragments are not matched: leave them out")
		return nil, "", false
	}
	if i := strings.IndexByte(rest, '/'); i >= 0 {
		rest, tail = rest[:i], rest[i:]
	}
	host := strings.ToLower(rest)
	if i := strings.LastIndexByte(host, ':'); i >= 0 && !strings.HasSuffix(host, "]") {
		port, err := strconv.ParseUint(host[i+1:], 10, 16)
		if err != nil || port == 0 {
			r.invalid(path, whole, "the port must be a number from 1 to 65535; an IPv6 address stands in brackets")
			return nil, "", false
		}
		host, out.Port = host[:i], uint32(port)
	}
	switch domain, wild := strings.CutPrefix(host, "*."); {
	case host == "*":
	case wild && isHost(domain):
		out.Host = &meshv1.TextMatch{Kind: &meshv1.TextMatch_Suffix{Suffix: "." + domain}}
	case strings.HasPrefix(host, "["):
		address, err := netip.ParseAddr(strings.TrimSuffix(host[1:], "]"))
		if err != nil || !address.Is6() || address.Zone() != "" || !strings.HasSuffix(host, "]") {
			r.invalid(path, whole, "what stands in brackets must be an IPv6 address")
			return nil, "", false
		}
		out.Host = &meshv1.TextMatch{Kind: &meshv1.TextMatch_Exact{Exact: address.String()}}
	case isHost(host):
		out.Host = &meshv1.TextMatch{Kind: &meshv1.TextMatch_Exact{Exact: host}}
	default:
		r.invalid(path, whole, `the host must be a name, an address, "*.domain" or "*"; names of other letters as they are in DNS (xn--...)`)
		return nil, "", false
	}
	return out, tail, true
}

func isHost(s string) bool { return len(s) <= 253 && hostname.MatchString(s) }

// text renders a match; nil if it matches any text or is invalid.
func (r *Renderer) text(in *v1alpha1.StringMatch, path *field.Path, host bool) *meshv1.TextMatch {
	if in == nil {
		return nil
	}
	exact, prefix := in.Exact, in.Prefix
	if host {
		exact, prefix = strings.ToLower(exact), strings.ToLower(prefix)
		if !r.hostText(in, exact, prefix, path) {
			return nil
		}
	}
	switch {
	case exact != "" && prefix == "" && in.Regex == "":
		return &meshv1.TextMatch{Kind: &meshv1.TextMatch_Exact{Exact: exact}}
	case exact == "" && prefix != "" && in.Regex == "":
		return &meshv1.TextMatch{Kind: &meshv1.TextMatch_Prefix{Prefix: prefix}}
	case exact == "" && prefix == "" && in.Regex != "":
		if host {
			return r.hostExpression(in.Regex, path.Child("regex"))
		}
		return r.pathExpression(in.Regex, path.Child("regex"))
	}
	r.Errs = append(r.Errs, field.Required(path, "set one of exact, prefix and regex, and not to nothing"))
	return nil
}

// hostText reports whether a host can equal exact or begin with prefix.
func (r *Renderer) hostText(in *v1alpha1.StringMatch, exact, prefix string, path *field.Path) bool {
	switch _, err := netip.ParseAddr(exact); {
	case exact != "" && err != nil && !isHost(exact):
		r.invalid(path.Child("exact"), in.Exact, "must be the name of a host or an address, without scheme, port, path and brackets")
		return false
	case !hostStart.MatchString(prefix):
		r.invalid(path.Child("prefix"), in.Prefix, "must be what the name of a host, or an address, begins with: without scheme, port and path")
		return false
	}
	return true
}

// ignoreCase are the flags of an expression for hosts.
const ignoreCase = "(?i)"

// maxUncompiled is how many expressions of an object may fail to compile before the others are
// rejected unread. To find out that one is too large takes as long as to compile it.
const maxUncompiled = 16

// expression compiles a regular expression with flags as agents do. It returns nil if that is
// not possible, or if the expression is too large. It compiles none once those before it exceed
// their bound: each takes milliseconds.
func (r *Renderer) expression(flags, s string, path *field.Path) *expression.Whole {
	if limit := expression.Max - len(flags); len(s) > limit {
		r.invalid(path, "(long)", "must not be longer than %d characters", limit)
		return nil
	}
	if r.Expressions > meshv1.MaxMatchSteps || r.uncompiled >= maxUncompiled {
		r.invalid(path, s, "not read, because too many expressions before it are too costly or invalid: fix those first")
		return nil
	}
	// The expression must be valid both by itself and in the group that agents put around
	// it: neither "a)(b" nor "\Qa" is valid in both.
	_, err := syntax.Parse(s, syntax.Perl)
	if err == nil {
		_, err = syntax.Parse("^(?:"+s+")$", syntax.Perl)
	}
	if err != nil {
		r.uncompiled++
		r.invalid(path, s, "not a regular expression of RE2: %v", err)
		return nil
	}
	compiled, err := expression.CompileWhole(flags + s)
	if err != nil {
		r.uncompiled++
		r.invalid(path, s, "too large: %v", err)
		return nil
	}
	return compiled
}

// pathExpression parses an expression for a path. It returns nil if the expression is invalid.
func (r *Renderer) pathExpression(s string, at *field.Path) *meshv1.TextMatch {
	compiled := r.expression("", s, at)
	if compiled == nil {
		return nil
	}
	out := pathOf(&meshv1.TextMatch{Kind: &meshv1.TextMatch_Regexp{Regexp: s}})
	if out != nil && !r.takes(compiled.PathSteps, s, at) {
		return nil
	}
	return out
}

// takes adds the steps of an expression, and reports whether they are within the bound.
func (r *Renderer) takes(steps int, s string, at *field.Path) bool {
	if r.Expressions += steps; r.Expressions > meshv1.MaxMatchSteps {
		r.invalid(at, s, "too costly: with the expressions before it, it takes up to %d steps for one request, and at most %d are permitted: repeat less, or match without an expression", r.Expressions, meshv1.MaxMatchSteps)
		return false
	}
	return true
}

// methodsOf returns methods in upper case without duplicates; empty if any method matches.
func methodsOf(in ...string) (out []string) {
	for _, m := range in {
		if m == "" || m == "*" {
			return nil
		}
		if m = strings.ToUpper(m); !slices.Contains(out, m) {
			out = append(out, m)
		}
	}
	return out
}

func headersOf(in []v1alpha1.HeaderMatch) []*meshv1.HeaderMatch {
	return collect.Map(in, func(h v1alpha1.HeaderMatch) *meshv1.HeaderMatch {
		return &meshv1.HeaderMatch{Name: h.Name, Value: h.Value}
	})
}

func pathsOf(in []v1alpha1.NonResourceRule) []*meshv1.PathMatch {
	return collect.Map(in, func(m v1alpha1.NonResourceRule) *meshv1.PathMatch {
		return &meshv1.PathMatch{Paths: m.NonResourceURLs, Verbs: m.Verbs}
	})
}
