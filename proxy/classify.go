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
	"k8s.io/apiserver/pkg/endpoints/request"

	"github.com/ctrlmesh/ctrlmesh/proxy/status"
)

// builtIn are the API groups that kube-apiserver serves itself. It proxies other
// groups to extension servers, or keeps them as custom resources: a request does not
// show which.
var builtIn = sets.New(
	"", "apps", "autoscaling", "batch", "extensions", "policy",
	"admissionregistration.k8s.io", "apiextensions.k8s.io", "apiregistration.k8s.io",
	"authentication.k8s.io", "authorization.k8s.io", "certificates.k8s.io",
	"coordination.k8s.io", "discovery.k8s.io", "events.k8s.io",
	"flowcontrol.apiserver.k8s.io", "internal.apiserver.k8s.io", "networking.k8s.io",
	"node.k8s.io", "rbac.authorization.k8s.io", "resource.k8s.io",
	"scheduling.k8s.io", "storage.k8s.io", "storagemigration.k8s.io",
)

// local reports whether kube-apiserver carries out the request itself.
func (k planKey) local() bool { return builtIn.Has(k.group) && !k.connects() }

// resolver reads paths as kube-apiserver does.
var resolver = &request.RequestInfoFactory{
	APIPrefixes:          sets.NewString("api", "apis"),
	GrouplessAPIPrefixes: sets.NewString("api"),
}

// classifyStage refuses a request that cannot be classified.
type classifyStage struct{}

func (classifyStage) apply(x *exchange) *outcome {
	if x.classify(); x.malformed != nil {
		return refusalBy("malformed", x.malformed)
	}
	return nil
}

// classify classifies the request once.
func (x *exchange) classify() {
	if x.info == nil && x.malformed == nil {
		x.info, x.malformed = classify(x.r)
	}
}

// classify tells what r asks for, and refuses what could be read in two ways:
// the apiserver must never see another request than the one classified here.
//
// The apiserver neither cleans paths nor knows encoded slashes apart from plain
// ones. Empty, "." and ".." segments and encoded slashes have no good use before
// the tail of a proxy subresource, so they are refused there. A trailing slash
// means nothing to either side and passes.
func classify(r *http.Request) (*request.RequestInfo, *apierrors.StatusError) {
	switch r.Method {
	case http.MethodGet, http.MethodHead, http.MethodPost, http.MethodPut,
		http.MethodPatch, http.MethodDelete, http.MethodOptions:
	default: // CONNECT among them
		return nil, status.New(http.StatusMethodNotAllowed, "MethodNotAllowed", 0, "method %q is not proxied", r.Method)
	}
	if !strings.HasPrefix(r.URL.Path, "/") || r.URL.Opaque != "" {
		return nil, status.BadRequest("the request target is not a path")
	}
	if !clean(r.URL.RawQuery) || !clean(r.Host) || r.Host == "" || !httpguts.ValidHostHeader(r.Host) {
		return nil, status.BadRequest("malformed request target")
	}
	// The query is left out: NewRequestInfo would log it when it cannot decode it.
	info, err := resolver.NewRequestInfo(&http.Request{Method: r.Method, URL: &url.URL{Path: r.URL.Path}})
	if err != nil {
		return nil, status.BadRequest("the path names no resource")
	}
	if refused := checkPath(r.URL, info); refused != nil {
		return nil, refused
	}
	if info.Verb == "list" && r.URL.RawQuery != "" {
		fromQuery(info, r.URL.Query())
	}
	return info, nil
}

// fromQuery does what NewRequestInfo does with the query of a list.
func fromQuery(info *request.RequestInfo, query url.Values) {
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

func checkPath(u *url.URL, info *request.RequestInfo) *apierrors.StatusError {
	escaped := u.EscapedPath()
	if !strings.Contains(escaped, "//") && !strings.Contains(escaped, "/.") && !strings.Contains(escaped, "%") {
		return nil
	}
	segments := strings.Split(strings.TrimPrefix(escaped, "/"), "/")
	if isProxy(info) {
		// What follows belongs to whatever is proxied to. Up to there the decoded
		// and the escaped segments correspond, or the loop refuses.
		head := len(strings.Split(strings.Trim(u.Path, "/"), "/")) - len(info.Parts) + 3
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

func isProxy(info *request.RequestInfo) bool {
	return upgrades(planKey{subresource: info.Subresource, groupResource: groupResource{info.APIGroup, info.Resource}}) &&
		info.Subresource == "proxy"
}

// clean tells whether s can stand in a request line or a Host header.
func clean(s string) bool {
	for i := range len(s) {
		if c := s[i]; c <= ' ' || c >= 0x7f {
			return false
		}
	}
	return true
}
