package query

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"sync"
	"time"
	"unicode"

	"github.com/prometheus/client_golang/api"
	promv1 "github.com/prometheus/client_golang/api/prometheus/v1"
	"github.com/prometheus/common/model"

	"github.com/ctrlmesh/ctrlmesh/manager/internal/text"
)

const (
	// maxBody and maxHeader bound a response, in bytes.
	maxBody   = 256 << 10
	maxHeader = 64 << 10
	// maxMessage bounds what an error shows of a response, in bytes.
	maxMessage = 256
)

// Prometheus evaluates queries by the HTTP API of Prometheus, or of a system with the same API.
type Prometheus struct {
	// URL of the server; empty if there is none.
	URL string
	// TokenFile has the bearer token of requests; without a name there is none. CAFile has the CAs in
	// PEM that verify the server; without a name they are those of the system. Both are read again
	// while the manager runs.
	TokenFile, CAFile string

	mu   sync.Mutex
	cas  []byte          // that base trusts
	base *http.Transport // nil before the first request
}

// ValidURL returns an error if the URL of a Prometheus is invalid. It may be empty.
func ValidURL(text string) error {
	if text == "" {
		return nil
	}
	// The error does not show the URL, which may have a password.
	u, err := url.Parse(text)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "" || u.User != nil || u.RawQuery != "" || u.Fragment != "" {
		return errors.New("invalid URL: write http://HOST[:PORT][/PATH] or https://HOST[:PORT][/PATH], without a password")
	}
	return nil
}

// Evaluate evaluates a query at the present time of the server. Errors are bounded, and have neither
// secrets nor bodies of responses.
func (p *Prometheus) Evaluate(ctx context.Context, q Query) (Answer, error) {
	if p.URL == "" {
		return Answer{}, errors.New("no Prometheus is configured: ask the administrator of the mesh to set analysis.prometheus.url of its chart, or remove the query")
	}
	t, err := p.tenant(q.Namespace)
	if err != nil {
		return Answer{}, err
	}
	client, err := api.NewClient(api.Config{Address: p.URL, Client: &http.Client{
		Transport: t,
		// A redirect could lead anywhere, with the token.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}})
	if err != nil {
		return Answer{}, ValidURL(p.URL)
	}
	value, _, err := promv1.NewAPI(client).Query(ctx, q.Expression, time.Time{}, promv1.WithTimeout(timeout))
	if err != nil {
		return Answer{}, errors.New(clean(describe(err), t.token))
	}
	return answerOf(value), nil
}

// tenant sends the requests of a namespace, and bounds the responses.
type tenant struct {
	base             *http.Transport
	token, namespace string
}

// RoundTrip implements http.RoundTripper. Servers that enforce tenancy require the parameter namespace
// and restrict the query to it: prom-label-proxy, and kube-rbac-proxy, which reads it from the URL
// alone. Others ignore it.
func (t tenant) RoundTrip(request *http.Request) (*http.Response, error) {
	request = request.Clone(request.Context())
	parameters := request.URL.Query()
	parameters.Set("namespace", t.namespace)
	request.URL.RawQuery = parameters.Encode()
	if t.token != "" {
		request.Header.Set("Authorization", "Bearer "+t.token)
	}
	response, err := t.base.RoundTrip(request)
	if err == nil {
		response.Body = http.MaxBytesReader(nil, response.Body, maxBody)
	}
	return response, err
}

// tenant reads the files, and returns the tenant of a namespace.
func (p *Prometheus) tenant(namespace string) (t tenant, err error) {
	t.namespace = namespace
	if p.TokenFile != "" {
		token, err := os.ReadFile(p.TokenFile)
		if err != nil {
			return t, fmt.Errorf("reading the token for Prometheus: %w", err)
		}
		if t.token = strings.TrimSpace(string(token)); t.token == "" || strings.ContainsFunc(t.token, func(c rune) bool { return c <= ' ' || c > '~' }) {
			return t, fmt.Errorf("reading the token for Prometheus: %s has no token", p.TokenFile)
		}
	}
	var cas []byte
	if p.CAFile != "" {
		if cas, err = os.ReadFile(p.CAFile); err != nil {
			return t, fmt.Errorf("reading the CAs of Prometheus: %w", err)
		}
	}
	t.base, err = p.transport(cas)
	return t, err
}

// transport returns the transport that trusts the CAs; those of the system if there are none.
func (p *Prometheus) transport(cas []byte) (*http.Transport, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.base != nil && bytes.Equal(p.cas, cas) {
		return p.base, nil
	}
	config := &tls.Config{MinVersion: tls.VersionTLS12}
	if p.CAFile != "" {
		config.RootCAs = x509.NewCertPool()
		if !config.RootCAs.AppendCertsFromPEM(cas) {
			return nil, fmt.Errorf("reading the CAs of Prometheus: %s has no certificate", p.CAFile)
		}
	}
	if p.base != nil {
		p.base.CloseIdleConnections()
	}
	p.cas = cas
	p.base = &http.Transport{
		Proxy: http.ProxyFromEnvironment, TLSClientConfig: config, ForceAttemptHTTP2: true,
		MaxResponseHeaderBytes: maxHeader, MaxIdleConnsPerHost: evaluators, IdleConnTimeout: time.Minute,
	}
	return p.base, nil
}

// describe returns what failed. It omits bodies of responses and, since each connection has another
// one, local ports: statuses change with this text.
func describe(err error) string {
	var refused *promv1.Error
	var large *http.MaxBytesError
	var op *net.OpError
	var sent *url.Error
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return fmt.Sprintf("Prometheus did not answer within %s", timeout)
	case errors.As(err, &large):
		return fmt.Sprintf("its result exceeds %d KiB: aggregate more in the query", large.Limit>>10)
	case errors.As(err, &refused) && refused.Type != promv1.ErrBadResponse:
		return "Prometheus answered with an error: " + refused.Error()
	case errors.As(err, &op):
		return fmt.Sprintf("no connection to Prometheus: %s: %s", op.Op, op.Err)
	case errors.As(err, &sent):
		return "no connection to Prometheus: " + sent.Err.Error()
	case errors.Is(err, io.ErrUnexpectedEOF):
		return "Prometheus did not send its whole response"
	}
	return "the response is not a scalar or an instant vector in the format of Prometheus"
}

// clean returns a text on one line that is bounded, and has no token.
func clean(s, token string) string {
	if token != "" {
		s = strings.ReplaceAll(s, token, "[token]")
	}
	s = strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return ' '
	}, strings.ToValidUTF8(s, " "))
	return text.Bounded(s, maxMessage)
}

// answerOf returns the answer that a result gives.
func answerOf(value model.Value) (a Answer) {
	switch v := value.(type) {
	case *model.Scalar:
		a.add(float64(v.Value))
	case model.Vector:
		for _, s := range v {
			if s.Histogram != nil {
				a.Problem = "a sample of its result is a histogram: apply a function such as histogram_quantile"
				continue
			}
			a.add(float64(s.Value))
		}
		if len(v) == 0 {
			a.Problem = "its result is empty: check that Prometheus has its series"
		}
	default:
		a.Problem = "its result is a range vector: apply a function such as rate or avg_over_time"
	}
	return a
}

// add adds a value of the result.
func (a *Answer) add(value float64) {
	switch {
	case math.IsNaN(value):
		a.Problem = "its result is not a number, as when zero is divided by zero"
		return
	case a.Numbers == 0:
		a.Min, a.Max = value, value
	}
	a.Numbers++
	a.Min, a.Max = min(a.Min, value), max(a.Max, value)
}
