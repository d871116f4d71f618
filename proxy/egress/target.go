package egress

import (
	"net/netip"
	"strconv"
	"strings"
)

// authority splits the authority of a request into the host, in lower case, and the
// port, 0 if there is none. It reports whether s is valid.
func authority(s string) (host string, port uint16, ok bool) {
	host, rest := s, ""
	if inner, literal := strings.CutPrefix(s, "["); literal {
		inner, after, closed := strings.Cut(inner, "]")
		addr, err := netip.ParseAddr(inner)
		if !closed || err != nil || !addr.Is6() || addr.Zone() != "" {
			return "", 0, false
		}
		host, rest = addr.String(), after
	} else {
		if i := strings.IndexByte(s, ':'); i >= 0 {
			host, rest = s[:i], s[i:]
		}
		if host, ok = domain(strings.TrimSuffix(host, ".")); !ok {
			return "", 0, false
		}
	}
	if rest == "" || rest == ":" {
		return host, 0, true
	}
	digits, found := strings.CutPrefix(rest, ":")
	n, err := strconv.ParseUint(digits, 10, 16)
	if !found || err != nil || n == 0 {
		return "", 0, false
	}
	return host, uint16(n), true
}

// unambiguous reports whether all servers read the same path from a target. raw is the
// path without the query, path is raw decoded once. Servers may differ if they split the
// target differently, decode it twice or resolve dot segments.
func unambiguous(raw, path string) bool {
	if path == "*" {
		return true
	}
	if !strings.HasPrefix(path, "/") || strings.ContainsAny(path, `\;#`) || strings.Contains(path, "//") {
		return false
	}
	if strings.ContainsFunc(path, func(c rune) bool { return c < ' ' || c == 0x7f }) {
		return false
	}
	for segment := range strings.SplitSeq(path, "/") {
		if segment == "." || segment == ".." {
			return false
		}
	}
	return !separatorEscaped(raw) && !separatorEscaped(path) && !strings.Contains(strings.ToLower(path), "%2e")
}

// separatorEscaped reports whether s has an escaped slash or backslash.
func separatorEscaped(s string) bool {
	s = strings.ToLower(s)
	return strings.Contains(s, "%2f") || strings.Contains(s, "%5c")
}
