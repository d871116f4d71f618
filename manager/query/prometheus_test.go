package query

import (
	"context"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// respond serves a response to each request.
func respond(t *testing.T, code int, body string) *Prometheus {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(code)
		_, _ = io.WriteString(w, body)
	}))
	t.Cleanup(s.Close)
	return &Prometheus{URL: s.URL}
}

func vector(samples ...string) string {
	return `{"status":"success","data":{"resultType":"vector","result":[` + strings.Join(samples, ",") + `]}}`
}

func sample(value string) string {
	return `{"metric":{"pod":"op-0"},"value":[1700000000.781,"` + value + `"]}`
}

func TestResultsGiveAnswers(t *testing.T) {
	const notNumber = "its result is not a number, as when zero is divided by zero"
	for name, test := range map[string]struct {
		body string
		want Answer
	}{
		"scalar":         {`{"status":"success","data":{"resultType":"scalar","result":[1700000000.781,"7.3"]}}`, Answer{Numbers: 1, Min: 7.3, Max: 7.3}},
		"scalar NaN":     {`{"status":"success","data":{"resultType":"scalar","result":[1700000000.781,"NaN"]}}`, Answer{Problem: notNumber}},
		"vector":         {vector(sample("3"), sample("-1"), sample("2")), Answer{Numbers: 3, Min: -1, Max: 3}},
		"empty":          {vector(), Answer{Problem: "its result is empty: check that Prometheus has its series"}},
		"NaN":            {vector(sample("NaN")), Answer{Problem: notNumber}},
		"NaN and number": {vector(sample("NaN"), sample("4")), Answer{Numbers: 1, Min: 4, Max: 4, Problem: notNumber}},
		"histogram": {vector(`{"metric":{},"histogram":[1700000000.781,{"count":"1","sum":"2","buckets":[[0,"1","2","1"]]}]}`),
			Answer{Problem: "a sample of its result is a histogram: apply a function such as histogram_quantile"}},
		"matrix": {`{"status":"success","data":{"resultType":"matrix","result":[{"metric":{},"values":[[1700000000.781,"1"]]}]}}`,
			Answer{Problem: "its result is a range vector: apply a function such as rate or avg_over_time"}},
		"warnings": {`{"status":"success","warnings":["partial"],"data":{"resultType":"scalar","result":[1,"2"]}}`, Answer{Numbers: 1, Min: 2, Max: 2}},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := respond(t, http.StatusOK, test.body).Evaluate(t.Context(), one)
			require.NoError(t, err)
			require.Equal(t, test.want, got)
		})
	}
}

func TestErrorsAreDescribed(t *testing.T) {
	const format = "the response is not a scalar or an instant vector in the format of Prometheus"
	for name, test := range map[string]struct {
		code       int
		body, want string
	}{
		"parse error": {400, `{"status":"error","errorType":"bad_data","error":"invalid parameter \"query\": 1:3: parse error:\nunexpected end of input"}`,
			`Prometheus answered with an error: bad_data: invalid parameter "query": 1:3: parse error: unexpected end of input`},
		"execution":    {422, `{"status":"error","errorType":"execution","error":"too many samples"}`, "Prometheus answered with an error: execution: too many samples"},
		"long":         {422, `{"status":"error","errorType":"execution","error":"` + strings.Repeat("x", 1000) + `"}`, "Prometheus answered with an error: execution: " + strings.Repeat("x", 210) + "..."},
		"unauthorized": {401, `secret`, "Prometheus answered with an error: client_error: client error: 401"},
		"forbidden":    {403, `secret`, "Prometheus answered with an error: client_error: client error: 403"},
		"unavailable":  {502, `<html>secret</html>`, "Prometheus answered with an error: server_error: server error: 502"},
		"no JSON":      {200, `<html>secret</html>`, format},
		"other JSON":   {200, `{"secret":true}`, format},
		"string":       {200, `{"status":"success","data":{"resultType":"string","result":[1,"secret"]}}`, format},
		"no number":    {200, vector(sample("secret")), format},
		"too large":    {200, vector(sample(strings.Repeat("1", maxBody))), "its result exceeds 256 KiB: aggregate more in the query"},
		"large error":  {500, strings.Repeat("x", maxBody+1), "its result exceeds 256 KiB: aggregate more in the query"},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := respond(t, test.code, test.body).Evaluate(t.Context(), one)
			require.EqualError(t, err, test.want)
			require.Empty(t, got)
		})
	}
}

func TestNoConnection(t *testing.T) {
	p := respond(t, 200, "")
	p.URL = "http://127.0.0.1:1"
	_, err := p.Evaluate(t.Context(), one)
	require.EqualError(t, err, "no connection to Prometheus: dial: connect: connection refused")

	p.URL = ""
	_, err = p.Evaluate(t.Context(), one)
	require.ErrorContains(t, err, "no Prometheus is configured: ask the administrator of the mesh to set analysis.prometheus.url")
}

func TestSlowResponse(t *testing.T) {
	for name, begin := range map[string]string{"headers": "", "body": `{"status":`} {
		t.Run(name, func(t *testing.T) {
			s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if begin != "" {
					_, _ = io.WriteString(w, begin)
					w.(http.Flusher).Flush()
				}
				_, _ = io.Copy(io.Discard, r.Body) // so that the end of the connection is seen
				<-r.Context().Done()
			}))
			t.Cleanup(s.Close)
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
			defer cancel()
			_, err := (&Prometheus{URL: s.URL}).Evaluate(ctx, one)
			require.EqualError(t, err, "Prometheus did not answer within 10s")
		})
	}
}

// request is what a server was sent.
type request struct{ method, path, query, form, authorization string }

func TestRequestsNameTheNamespace(t *testing.T) {
	var got []request
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		require.NoError(t, r.ParseForm())
		got = append(got, request{r.Method, r.URL.Path, r.URL.Query().Get("namespace"), r.Form.Get("query"), r.Header.Get("Authorization")})
		require.Equal(t, []string{"ns"}, r.Form["namespace"])
		require.Equal(t, "10s", r.Form.Get("timeout"))
		if r.Method == http.MethodPost {
			w.WriteHeader(http.StatusForbidden)
			return
		}
		_, _ = io.WriteString(w, vector(sample("1")))
	}))
	t.Cleanup(s.Close)
	q := Query{Namespace: "ns", Expression: `up{a="&namespace=other"}`}
	_, err := (&Prometheus{URL: s.URL + "/base/"}).Evaluate(t.Context(), q)
	require.NoError(t, err)
	const path = "/base/api/v1/query"
	require.Equal(t, []request{{"POST", path, "ns", q.Expression, ""}, {"GET", path, "ns", q.Expression, ""}}, got, "GET where POST is forbidden")
}

func TestToken(t *testing.T) {
	file := filepath.Join(t.TempDir(), "token")
	var got string
	reply := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		got = r.Header.Get("Authorization")
		w.WriteHeader(http.StatusUnprocessableEntity)
		_, _ = fmt.Fprintf(w, `{"status":"error","errorType":"execution","error":"you sent %s"}`, got)
	})
	s := httptest.NewServer(reply)
	t.Cleanup(s.Close)
	p := &Prometheus{URL: s.URL, TokenFile: file}
	_, err := p.Evaluate(t.Context(), one)
	require.ErrorContains(t, err, "reading the token for Prometheus: ")
	for _, token := range []string{"first", "second"} { // it is read again
		require.NoError(t, os.WriteFile(file, []byte(token+"\n"), 0o600))
		_, err = p.Evaluate(t.Context(), one)
		require.EqualError(t, err, "Prometheus answered with an error: execution: you sent Bearer [token]")
		require.Equal(t, "Bearer "+token, got)
	}
	got = ""
	for _, content := range []string{"", " \n", "two\nlines", "\x00secret"} {
		require.NoError(t, os.WriteFile(file, []byte(content), 0o600))
		_, err = p.Evaluate(t.Context(), one)
		require.EqualError(t, err, "reading the token for Prometheus: "+file+" has no token")
	}
	require.Empty(t, got)
}

// A redirect could lead to any server, with the token.
func TestRedirectsAreNotFollowed(t *testing.T) {
	followed := false
	other := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { followed = true }))
	t.Cleanup(other.Close)
	s := httptest.NewServer(http.RedirectHandler(other.URL, http.StatusTemporaryRedirect))
	t.Cleanup(s.Close)
	_, err := (&Prometheus{URL: s.URL}).Evaluate(t.Context(), one)
	require.Error(t, err)
	require.False(t, followed)
}

func TestCAsAreReadAgain(t *testing.T) {
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, vector(sample("1"))) }))
	s.Config.ErrorLog = log.New(io.Discard, "", 0)
	s.StartTLS()
	t.Cleanup(s.Close)
	p := &Prometheus{URL: s.URL}
	_, err := p.Evaluate(t.Context(), one)
	require.ErrorContains(t, err, "no connection to Prometheus: tls: ", "the system does not trust it")

	p.CAFile = filepath.Join(t.TempDir(), "ca.crt")
	_, err = p.Evaluate(t.Context(), one)
	require.ErrorContains(t, err, "reading the CAs of Prometheus: ")
	require.NoError(t, os.WriteFile(p.CAFile, []byte("no CA"), 0o600))
	_, err = p.Evaluate(t.Context(), one)
	require.EqualError(t, err, "reading the CAs of Prometheus: "+p.CAFile+" has no certificate")

	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw})
	require.NoError(t, os.WriteFile(p.CAFile, ca, 0o600))
	for range 2 {
		_, err = p.Evaluate(t.Context(), one)
		require.NoError(t, err)
	}
}

func TestURLs(t *testing.T) {
	for _, valid := range []string{"", "http://prometheus.monitoring:9090", "https://thanos.example/tenancy/", "https://[fd00::1]:9092"} {
		require.NoError(t, ValidURL(valid), valid)
	}
	for _, invalid := range []string{"prometheus:9090", "ftp://a", "http://", "http://:9090", "https://u:password@a", "http://a?b=c", "http://a#b", "http://a b"} {
		err := ValidURL(invalid)
		require.Error(t, err, invalid)
		require.NotContains(t, err.Error(), "password@")
	}
}
