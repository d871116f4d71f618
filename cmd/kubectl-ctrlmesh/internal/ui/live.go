package ui

import (
	"bytes"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"time"
)

// readTimeout bounds one reading of the cluster.
const readTimeout = 30 * time.Second

// events sends the content of a page whenever it has changed, as server-sent events.
func (s *Server) events(w http.ResponseWriter, r *http.Request) {
	of, err := url.Parse(r.URL.Query().Get("page"))
	if err != nil || of.Host != "" {
		http.Error(w, "invalid page", http.StatusBadRequest)
		return
	}
	if v, _, err := s.find(of); err == nil && v.still {
		http.Error(w, "this page does not follow the cluster", http.StatusBadRequest)
		return
	}
	select {
	case s.live <- struct{}{}:
		defer func() { <-s.live }()
	default:
		http.Error(w, fmt.Sprintf("more than %d pages follow the cluster: close some", maxLive), http.StatusServiceUnavailable)
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	to := http.NewResponseController(w)
	var last []byte
	for {
		now := s.content(r.Context(), of).html
		event := ": nothing has changed\n\n"
		if !bytes.Equal(now, last) {
			event, last = eventOf(now), now
		}
		_, err := w.Write([]byte(event))
		if err != nil || to.Flush() != nil {
			return // the browser is gone
		}
		select {
		case <-r.Context().Done():
			return
		case <-time.After(s.Poll):
		}
	}
}

// eventOf returns a text as an event.
func eventOf(text []byte) string {
	var b strings.Builder
	for line := range strings.Lines(string(text)) {
		b.WriteString("data: " + strings.TrimRight(line, "\r\n") + "\n")
	}
	return b.String() + "\n"
}
