package stages

import (
	"encoding/base64"
	"strings"
	"testing"

	"github.com/ctrlmesh/ctrlmesh/proxy/pipeline"
)

// tokenWith returns a JWT with a payload, without a valid signature.
func tokenWith(payload string) string {
	return "e30." + base64.RawURLEncoding.EncodeToString([]byte(payload)) + ".c2ln"
}

func FuzzJudge(f *testing.F) {
	for _, s := range []string{"", "a.b.c", tokenWith(`{"kubernetes.io":{"pod":{"uid":"uid-1"}}}`), tokenWith(`{"kubernetes.io":{"pod":{"uid":"uid-2"}}}`), tokenWith(`{}`), "{}", "..", tokenWith("[[[[")} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, token string) {
		v := judge(token, "uid-1")
		if v == own && !strings.Contains(token, ".") {
			t.Fatal("no JWT is bound")
		}
		if v != malformed && strings.ContainsAny(token, " {\"\r\n") {
			t.Fatal("read in two ways")
		}
		for _, header := range []string{"Bearer " + token, token} {
			if got, ok := bearer(header); ok && (got == "" || strings.Contains(got, " ")) {
				t.Fatalf("%q", got)
			}
		}
		_ = foreignInQuery(token, "uid-1")
	})
}

func BenchmarkCheckTokens(b *testing.B) {
	s := &tokenStage{env: &Env{Info: PodInfo{UID: "uid-1"}}}
	header := "Bearer " + tokenWith(`{"kubernetes.io":{"pod":{"uid":"uid-1"}}}`) + strings.Repeat("x", 1000)
	x := &pipeline.State{Req: pipeline.Request{Header: pipeline.Header{"Authorization": {header}}, Query: "labelSelector=a%3Db&limit=500"}}
	b.ReportAllocs()
	for b.Loop() {
		if s.Apply(x) != nil {
			b.Fatal("refused")
		}
	}
}
