package ui

import (
	"crypto/subtle"
	"embed"
	"html/template"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/cost"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/render"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/snapshot"
)

// maxLive bounds the pages that follow the cluster at the same time.
const maxLive = 16

//go:embed static templates
var files embed.FS

// Server serves the pages to one user of this machine.
type Server struct {
	// Reader reads the cluster.
	Reader snapshot.Reader
	// Namespace restricts the pages to one namespace; empty: all.
	Namespace string
	// Hosts are the addresses of the server, as browsers write them. Other hosts are refused, whose
	// names may have been pointed to this machine.
	Hosts []string
	// Token is a secret with which all paths begin. Other users of this machine do not know it. It is no
	// cookie: browsers send those to all ports of a host.
	Token string
	// Poll is the time between two readings of a page that follows the cluster.
	Poll time.Duration

	templates *template.Template
	live      chan struct{} // a slot for each such page
	meter     meter
}

// Root is the path of the overview, below which all other paths are.
func (s *Server) Root() string { return "/" + s.Token + "/" }

// Handler returns the handler of all requests.
func (s *Server) Handler() http.Handler {
	s.live = make(chan struct{}, maxLive)
	s.templates = template.Must(template.New("").Funcs(template.FuncMap{"root": s.Root, "rate": cost.Rate, "size": render.Size}).ParseFS(files, "templates/*.html"))
	pages := http.NewServeMux()
	pages.Handle("GET /static/", http.FileServerFS(files))
	pages.HandleFunc("GET /events", s.events)
	pages.HandleFunc("GET /", s.page)
	return s.guarded(http.StripPrefix(strings.TrimSuffix(s.Root(), "/"), pages))
}

// guarded refuses other hosts and paths without the token, and forbids browsers to load anything from
// elsewhere, to frame a page, and to send its address to others.
func (s *Server) guarded(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		token, _, below := strings.Cut(strings.TrimPrefix(r.URL.Path, "/"), "/")
		switch {
		case !slices.Contains(s.Hosts, r.Host):
			http.Error(w, "unknown host: use the address that the command has printed", http.StatusForbidden)
			return
		case subtle.ConstantTimeCompare([]byte(token), []byte(s.Token)) != 1:
			http.Error(w, "unknown address: use the one that the command has printed, which is another one in each run", http.StatusForbidden)
			return
		case !below:
			http.Redirect(w, r, s.Root(), http.StatusFound)
			return
		}
		h := w.Header()
		h.Set("Content-Security-Policy", "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'")
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Referrer-Policy", "no-referrer")
		h.Set("Cache-Control", "no-store")
		next.ServeHTTP(w, r)
	})
}
