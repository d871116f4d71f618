package proxy

import (
	"net/http"
	"net/url"
	"strings"

	"golang.org/x/net/http/httpguts"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/validate/content"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/util/sets"
	apirequest "k8s.io/apiserver/pkg/endpoints/request"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
	"github.com/ctrlmesh/ctrlmesh/proxy/status"
)

// resolver reads paths as kube-apiserver does.
var resolver = &apirequest.RequestInfoFactory{
	APIPrefixes:          sets.NewString("api", "apis"),
	GrouplessAPIPrefixes: sets.NewString("api"),
}

// classifyStage refuses a request that cannot be classified.
type classifyStage struct{}

func (classifyStage) apply(x *state) *outcome {
	if x.req.classify(); x.req.malformed != nil {
		return refusalBy(meshv1.RefusedMalformed, x.req.malformed)
	}
	return nil
}

// classify determines once what r requests, and refuses ambiguous paths: the apiserver must
// never see another request than the one classified here.
//
// The apiserver neither cleans paths nor distinguishes encoded slashes from plain ones.
// Empty, "." and ".." segments and encoded slashes have no use before the tail of a proxy
// subresource, so they are refused there. Both sides ignore a trailing slash.
func (r *request) classify() {
	if r.info != nil || r.malformed != nil {
		return
	}
	if r.info, r.malformed = r.read(); r.malformed != nil {
		r.info = nil
	}
}

func (r *request) read() (*apirequest.RequestInfo, *apierrors.StatusError) {
	switch r.method {
	case http.MethodGet, http.MethodHead, http.MethodPost, http.MethodPut,
		http.MethodPatch, http.MethodDelete, http.MethodOptions:
	default: // CONNECT among them
		return nil, status.New(http.StatusMethodNotAllowed, "MethodNotAllowed", 0, "method %q is not proxied", r.method)
	}
	if !strings.HasPrefix(r.path, "/") {
		return nil, status.BadRequest("the request target is not a path")
	}
	if !clean(r.query) || !clean(r.host) || r.host == "" || !httpguts.ValidHostHeader(r.host) {
		return nil, status.BadRequest("malformed request target")
	}
	// Without the query, which NewRequestInfo would log if it cannot decode it.
	info, err := resolver.NewRequestInfo(&http.Request{Method: r.method, URL: &url.URL{Path: r.path}})
	if err != nil {
		return nil, status.BadRequest("the path names no resource")
	}
	if refused := r.checkPath(info); refused != nil {
		return nil, refused
	}
	if info.Verb == "list" && r.query != "" {
		fromQuery(info, parameters(r.query))
	}
	return info, nil
}

// parameters returns the parameters of a raw query that can be decoded.
func parameters(raw string) url.Values {
	values, _ := url.ParseQuery(raw)
	return values
}

// fromQuery does what NewRequestInfo does with the query of a list.
func fromQuery(info *apirequest.RequestInfo, query url.Values) {
	if values := query["watch"]; len(values) > 0 && values[0] != "0" && !strings.EqualFold(values[0], "false") {
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

func (r *request) checkPath(info *apirequest.RequestInfo) *apierrors.StatusError {
	escaped := r.escaped
	if !strings.Contains(escaped, "//") && !strings.Contains(escaped, "/.") && !strings.Contains(escaped, "%") {
		return nil
	}
	segments := strings.Split(strings.TrimPrefix(escaped, "/"), "/")
	if isProxy(info) {
		// The rest belongs to the server behind the proxy. Up to there the decoded and
		// the escaped segments correspond, or the loop refuses.
		head := len(strings.Split(strings.Trim(r.path, "/"), "/")) - len(info.Parts) + 3
		segments = segments[:min(head, len(segments))]
	} else if n := len(segments) - 1; segments[n] == "" {
		segments = segments[:n]
	}
	for _, s := range segments {
		decoded, err := url.PathUnescape(s)
		if err != nil || decoded == "" || decoded == "." || decoded == ".." || strings.Contains(decoded, "/") {
			return status.BadRequest("the path has an empty, a dot or an encoded segment")
		}
	}
	return nil
}

// upgrades is the list of subresources that speak SPDY or websocket.
func upgrades(key match.Kind) bool {
	if key.Group != "" {
		return false
	}
	switch key.Resource + "/" + key.Subresource {
	case "pods/exec", "pods/attach", "pods/portforward",
		"pods/proxy", "services/proxy", "nodes/proxy":
		return true
	}
	return false
}

func isProxy(info *apirequest.RequestInfo) bool {
	return upgrades(match.Kind{Group: info.APIGroup, Resource: info.Resource, Subresource: info.Subresource}) &&
		info.Subresource == "proxy"
}

// clean reports whether s can stand in a request line or a Host header.
func clean(s string) bool {
	for i := range len(s) {
		if c := s[i]; c <= ' ' || c >= 0x7f {
			return false
		}
	}
	return true
}
