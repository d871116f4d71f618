package ui

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"html/template"
	"net/http"
	"net/url"
	"strings"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/check"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/operator"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/report"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/snapshot"
)

// content is the part of a page that follows the cluster.
type content struct {
	status int
	title  string
	html   []byte
}

// errNoPage means that no page has a path.
var errNoPage = errors.New("there is no such page")

// page serves a whole page.
func (s *Server) page(w http.ResponseWriter, r *http.Request) {
	is := s.content(r.Context(), r.URL)
	var out bytes.Buffer
	err := templates.ExecuteTemplate(&out, "page.html", map[string]any{
		"Title": is.title, "Body": template.HTML(is.html), "Page": r.URL.RequestURI(), "Path": r.URL.Path, //nolint:gosec // the other templates escape what is in it
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
	name, title, data, err := s.view(ctx, of)
	out := content{status: http.StatusOK, title: title}
	var html bytes.Buffer
	if err == nil {
		err = templates.ExecuteTemplate(&html, name, data)
	}
	if err != nil {
		out.status, out.title = http.StatusInternalServerError, "Error"
		if errors.Is(err, errNoPage) {
			out.status = http.StatusNotFound
		}
		html.Reset()
		_ = templates.ExecuteTemplate(&html, "error.html", err.Error()) // it fails for no text
	}
	out.html = html.Bytes()
	return out
}

// view returns what a page shows: a template, a title, and the data.
func (s *Server) view(ctx context.Context, of *url.URL) (name, title string, data any, err error) {
	path := strings.Split(strings.Trim(of.Path, "/"), "/")
	switch {
	case len(path) == 1 && path[0] == "":
		data, err = s.overview(ctx)
		return "overview.html", "Overview", data, err
	case len(path) == 1 && path[0] == "findings":
		data, err = s.findings(ctx)
		return "findings.html", "Findings", data, err
	case len(path) == 1 && path[0] == "limits":
		data, err = s.limits(ctx)
		return "limits.html", "Limits and faults", data, err
	case len(path) == 3 && path[0] == "operators":
		data, err = s.operator(ctx, path[1], path[2], of.Query().Get("key"))
		return "operator.html", path[2], data, err
	}
	return "", "", nil, errNoPage
}

func (s *Server) overview(ctx context.Context) (report.Status, error) {
	is, err := s.Reader.ReadAll(ctx, snapshot.Programs, snapshot.Configs(s.Namespace), snapshot.Members(s.Namespace))
	if err != nil {
		return report.Status{}, err
	}
	return report.StatusOf(is), nil
}

// findings are those of check, which says itself what it cannot read.
func (s *Server) findings(ctx context.Context) (check.Report, error) {
	is, err := s.Reader.Read(ctx, check.Parts()...)
	if err != nil {
		return check.Report{}, err
	}
	return check.Run(is), nil
}

// limits is what CircuitBreakers and FaultInjections do.
type limits struct {
	report.Breakers
	report.Faults
}

func (s *Server) limits(ctx context.Context) (limits, error) {
	is, err := s.Reader.ReadAll(ctx, snapshot.Breakers(s.Namespace), snapshot.Faults(s.Namespace))
	if err != nil {
		return limits{}, err
	}
	return limits{report.BreakersOf(is, ""), report.FaultsOf(is)}, nil
}

// operatorView is what the page of an operator shows.
type operatorView struct {
	Is       report.Operator
	Division report.Shards
	// Heaviest is the greatest number of objects of a shard.
	Heaviest int64
	// Key is what the owner was asked of, and KeyKind how the root assigns keys; empty if it is none.
	Key, KeyKind string
	Owner        string
}

func (s *Server) operator(ctx context.Context, namespace, name, key string) (operatorView, error) {
	if s.Namespace != "" && namespace != s.Namespace {
		return operatorView{}, errNoPage
	}
	is, err := s.Reader.ReadAll(ctx, snapshot.Configs(namespace), snapshot.Members(namespace))
	if err != nil {
		return operatorView{}, err
	}
	if err := s.Reader.Extend(ctx, is, snapshot.Locks); err != nil {
		return operatorView{}, err
	}
	config := is.Config(namespace, name)
	if config == nil {
		return operatorView{}, fmt.Errorf("%w: there is no ShardingConfig %s in namespace %s", errNoPage, name, namespace)
	}
	shards, err := report.ShardsOf(is, config)
	if err != nil {
		return operatorView{}, err
	}
	out := operatorView{Is: report.OperatorOf(config), Division: shards, Key: key}
	for _, one := range shards.Shards {
		if one.Objects != nil {
			out.Heaviest = max(out.Heaviest, *one.Objects)
		}
	}
	if config.Spec.Root != nil {
		out.owner(is, config)
	}
	return out, nil
}

// owner looks up the owner of the key.
func (o *operatorView) owner(s *snapshot.Snapshot, c *v1alpha1.ShardingConfig) {
	kind := operator.KeyOf(c)
	if o.KeyKind = strings.ToLower(string(kind)); kind == v1alpha1.KeyObject {
		o.KeyKind = "uid of an object"
	}
	if o.Key == "" {
		return
	}
	owner, err := report.OwnerOf(s, c, report.Key{Namespace: o.Key, UID: o.Key, Cluster: o.Key})
	if o.Owner = owner.Summary; err != nil {
		o.Owner = err.Error()
	}
}
