package ui

import (
	"crypto/subtle"
	"embed"
	"html/template"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/snapshot"
)

// maxLive bounds the pages that follow the cluster at the same time.
const maxLive = 16

//go:embed static templates
var files embed.FS

var templates = template.Must(template.ParseFS(files, "templates/*.html"))

// Server serves the pages to one user of this machine.
type Server struct {
	// Reader reads the cluster.
	Reader snapshot.Reader
	// Namespace restricts the pages to one namespace; empty: all.
	Namespace string
	// Hosts are the addresses of the server, as browsers write them. Other hosts are refused, whose
	// names may have been pointed to this machine.
	Hosts []string
	// Token is a secret that the user's browser presents once, at /enter. Other users of this machine
	// do not know it.
	Token string
	// Poll is the time between two readings of a page that follows the cluster.
	Poll time.Duration

	live chan struct{} // a slot for each such page
}

// Handler returns the handler of all requests.
func (s *Server) Handler() http.Handler {
	s.live = make(chan struct{}, maxLive)
	pages := http.NewServeMux()
	pages.HandleFunc("GET /enter", s.enter)
	pages.Handle("GET /static/", http.FileServerFS(files))
	pages.Handle("GET /events", s.entered(http.HandlerFunc(s.events)))
	pages.Handle("GET /", s.entered(http.HandlerFunc(s.page)))
	return s.guarded(pages)
}

// guarded refuses other hosts, and forbids browsers to load anything from elsewhere, and to frame a page.
func (s *Server) guarded(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !slices.Contains(s.Hosts, r.Host) {
			http.Error(w, "unknown host: use the address that the command has printed", http.StatusForbidden)
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

// enter begins a session.
func (s *Server) enter(w http.ResponseWriter, r *http.Request) {
	if !s.knows(r.URL.Query().Get("token")) {
		http.Error(w, "wrong token: use the address that the command has printed", http.StatusForbidden)
		return
	}
	http.SetCookie(w, &http.Cookie{Name: s.cookie(), Value: s.Token, Path: "/", HttpOnly: true, SameSite: http.SameSiteStrictMode})
	// A redirect would not send the new cookie if the user came from elsewhere, such as from a terminal.
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	_ = templates.ExecuteTemplate(w, "enter.html", nil) // the browser may be gone
}

// entered refuses requests outside of a session.
func (s *Server) entered(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c, err := r.Cookie(s.cookie())
		if err != nil || !s.knows(c.Value) {
			http.Error(w, "no session: use the address that the command has printed", http.StatusForbidden)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// cookie returns the name of the cookie with the token. Browsers do not distinguish ports, and several
// servers may run.
func (s *Server) cookie() string {
	return "ctrlmesh-session-" + s.Hosts[0][strings.LastIndexByte(s.Hosts[0], ':')+1:]
}

func (s *Server) knows(token string) bool {
	return subtle.ConstantTimeCompare([]byte(token), []byte(s.Token)) == 1
}
