package pipeline

import (
	"net/http"
	"net/url"
	"slices"
	"strings"

	"golang.org/x/net/http/httpguts"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/validate/content"
	"k8s.io/apimachinery/pkg/fields"

	"github.com/ctrlmesh/ctrlmesh/proxy/match"
	"github.com/ctrlmesh/ctrlmesh/proxy/status"
)

// Classify determines once what r requests, and refuses ambiguous paths: the apiserver must
// never see another request than the one classified here.
//
// The apiserver neither cleans paths nor distinguishes encoded slashes from plain ones.
// Empty, "." and ".." segments and encoded slashes have no use before the tail of a proxy
// subresource, so they are refused there. Both sides ignore a trailing slash. On the way to a
// member cluster there is another server, which may clean paths: there they are refused in the
// tail, too.
func (r *Request) Classify(paths ClusterPaths) {
	if (r.Info != nil || r.Malformed != nil) && slices.Equal(r.paths, paths) {
		return
	}
	r.paths = paths
	if r.Info, r.Malformed = r.read(); r.Malformed != nil {
		r.Info = nil
	}
}

func (r *Request) read() (*RequestInfo, *apierrors.StatusError) {
	switch r.Method {
	case http.MethodGet, http.MethodHead, http.MethodPost, http.MethodPut,
		http.MethodPatch, http.MethodDelete, http.MethodOptions:
	default: // CONNECT among them
		return nil, status.New(http.StatusMethodNotAllowed, "MethodNotAllowed", 0, "method %q is not proxied", r.Method)
	}
	if !strings.HasPrefix(r.Path, "/") {
		return nil, status.BadRequest("the request target is not a path")
	}
	if !clean(r.Query) || !clean(r.Host) || r.Host == "" || !httpguts.ValidHostHeader(r.Host) {
		return nil, status.BadRequest("malformed request target")
	}
	cluster, path := r.paths.cut(r.Path)
	r.Cluster = cluster
	info, err := readPath(r.Method, path)
	if err != nil {
		return nil, status.BadRequest("%v", err)
	}
	if refused := r.checkPath(info); refused != nil {
		return nil, refused
	}
	if info.Verb == "list" && r.Query != "" {
		fromQuery(info, Parameters(r.Query))
	}
	return info, nil
}

// Parameters returns the parameters of a raw query that can be decoded.
func Parameters(raw string) url.Values {
	values, _ := url.ParseQuery(raw)
	return values
}

// fromQuery does what kube-apiserver does with the query of a list.
func fromQuery(info *RequestInfo, query url.Values) {
	if IsTrue(query["watch"]) {
		info.Verb = "watch"
	}
	if values := query["fieldSelector"]; len(values) > 0 {
		if sel, err := fields.ParseSelector(values[0]); err == nil {
			if name, ok := sel.RequiresExactMatch("metadata.name"); ok && len(content.IsPathSegmentName(name)) == 0 {
				info.Name = name
			}
		}
	}
}

// IsTrue reads a boolean parameter as the apiserver does.
func IsTrue(values []string) bool {
	return len(values) > 0 && values[0] != "0" && !strings.EqualFold(values[0], "false")
}

func (r *Request) checkPath(info *RequestInfo) *apierrors.StatusError {
	escaped := r.Escaped
	if !strings.Contains(escaped, "//") && !strings.Contains(escaped, "/.") && !strings.Contains(escaped, "%") {
		return nil
	}
	segments := strings.Split(strings.TrimPrefix(escaped, "/"), "/")
	if isProxy(info) && r.Cluster == "" {
		// The rest belongs to the server behind the proxy. Up to there the decoded and
		// the escaped segments correspond, or the loop refuses.
		head := len(strings.Split(strings.Trim(r.Path, "/"), "/")) - len(info.Parts) + 3
		segments = segments[:min(head, len(segments))]
	} else if n := len(segments) - 1; segments[n] == "" {
		segments = segments[:n]
	}
	for _, s := range segments {
		decoded, err := url.PathUnescape(s)
		if err != nil || decoded == "" || decoded == "." || decoded == ".." || strings.Contains(decoded, "/") || r.Cluster != "" && strings.Contains(decoded, "%") {
			return status.BadRequest("the path has an empty, a dot or an encoded segment")
		}
	}
	return nil
}

// Kind returns what the plan of a request depends on. Info must be set.
func (r *Request) Kind() match.Kind {
	k := match.Kind{Verb: r.Info.Verb, Group: r.Info.APIGroup, Resource: r.Info.Resource, Subresource: r.Info.Subresource, MemberCluster: r.Cluster != ""}
	// Any subresource may be one that answers by WebSocket, as pods/log and those of aggregated APIs.
	k.Upgrade = k.Subresource != "" && k.Verb == "get" && r.AsksWebSocket()
	return k
}

// AsksWebSocket reports whether a request asks to change to WebSocket, and to nothing else.
func (r *Request) AsksWebSocket() bool {
	name, n := r.Header.Count("Upgrade")
	return n == 1 && strings.EqualFold(name, "websocket")
}

// upgraded are the subresources that speak SPDY or WebSocket, whatever the method.
var upgraded = []string{"pods/exec", "pods/attach", "pods/portforward", "pods/proxy", "services/proxy", "nodes/proxy"}

// Upgrades reports whether connections of a kind may change protocol.
func Upgrades(key match.Kind) bool {
	return key.Upgrade || key.Group == "" && slices.Contains(upgraded, key.Resource+"/"+key.Subresource)
}

func isProxy(info *RequestInfo) bool {
	return info.Subresource == "proxy" && Upgrades(match.Kind{Group: info.APIGroup, Resource: info.Resource, Subresource: info.Subresource})
}

// clean reports whether s can stand in a request line or a Host header.
func clean(s string) bool {
	return !strings.ContainsFunc(s, func(c rune) bool { return c <= ' ' || c >= 0x7f })
}
