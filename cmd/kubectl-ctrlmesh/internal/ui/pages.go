package ui

import (
	"bytes"
	"context"
	"errors"
	"html/template"
	"net/http"
	"net/url"
	"strings"
)

// view is a page: what it shows of the cluster, and how.
type view struct {
	// path of the page; segments in braces are parameters.
	path string
	// template is its file, without the extension.
	template string
	// still: it shows the cluster as of when it was loaded, because a reading costs much.
	still bool
	show  func(*Server, context.Context, parameters) (title string, data any, err error)
}

// views are all pages.
var views = []view{
	{path: "/", template: "overview", show: (*Server).overview},
	{path: "/findings", template: "findings", show: (*Server).findings},
	{path: "/costs", template: "costs", show: (*Server).costs},
	{path: "/limits", template: "limits", show: (*Server).limits},
	{path: "/operators/{namespace}/{name}", template: "operator", show: (*Server).operator},
	{path: "/pods/{namespace}/{name}", template: "pod", show: (*Server).pod},
	{path: "/advice/{namespace}/{kind}/{name}", template: "advice", still: true, show: (*Server).advice},
}

// parameters are those of the path of a page, and of its query.
type parameters struct {
	path  map[string]string
	query url.Values
}

// errNoPage means that no page has a path.
var errNoPage = errors.New("there is no such page")

// find returns the page of an address, and its parameters.
func (s *Server) find(of *url.URL) (view, parameters, error) {
	segments := strings.Split(strings.Trim(of.Path, "/"), "/")
	for _, v := range views {
		if path, ok := match(strings.Split(strings.Trim(v.path, "/"), "/"), segments); ok {
			if namespace, has := path["namespace"]; has && s.Namespace != "" && namespace != s.Namespace {
				return view{}, parameters{}, errNoPage
			}
			return v, parameters{path, of.Query()}, nil
		}
	}
	return view{}, parameters{}, errNoPage
}

// match returns the parameters of a path; ok is false if it is the path of another page.
func match(pattern, path []string) (out map[string]string, ok bool) {
	if len(pattern) != len(path) {
		return nil, false
	}
	out = map[string]string{}
	for i, p := range pattern {
		name, parameter := strings.CutPrefix(p, "{")
		if !parameter && p != path[i] {
			return nil, false
		}
		if parameter {
			out[strings.TrimSuffix(name, "}")] = path[i]
		}
	}
	return out, true
}

// content is the part of a page that follows the cluster.
type content struct {
	status int
	title  string
	still  bool
	html   []byte
}

// page serves a whole page.
func (s *Server) page(w http.ResponseWriter, r *http.Request) {
	is := s.content(r.Context(), r.URL)
	page := r.URL.RequestURI()
	if is.still {
		page = ""
	}
	var out bytes.Buffer
	err := s.templates.ExecuteTemplate(&out, "page.html", map[string]any{
		"Title": is.title, "Body": template.HTML(is.html), "Page": page, "Path": r.URL.Path, // the other templates escape what is in it
	})
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	w.WriteHeader(is.status)
	_, _ = w.Write(out.Bytes()) // the browser may be gone
}

// content reads the cluster, and returns the content of a page. An error is a content, too.
func (s *Server) content(ctx context.Context, of *url.URL) content {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	out := content{status: http.StatusOK}
	var html bytes.Buffer
	v, in, err := s.find(of)
	if err == nil {
		var data any
		if out.title, data, err = v.show(s, ctx, in); err == nil {
			err = s.templates.ExecuteTemplate(&html, v.template+".html", data)
		}
	}
	out.still = v.still
	if err != nil {
		out.status, out.title = http.StatusInternalServerError, "Error"
		if errors.Is(err, errNoPage) {
			out.status = http.StatusNotFound
		}
		html.Reset()
		_ = s.templates.ExecuteTemplate(&html, "error.html", err.Error()) // it fails for no text
	}
	out.html = html.Bytes()
	return out
}
