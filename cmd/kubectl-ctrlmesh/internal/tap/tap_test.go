package tap

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
)

const request = `{"time":"2026-01-02T03:04:05.678Z","level":"DEBUG","msg":"request","audit_id":"a","pod":"team/op-0","uid":"u","shard":"op-1-normal","verb":"update","resource":"deployments","subresource":"status","namespace":"ns","name":"web","code":409,"added":1500000,"bytes":321}`

func TestLinesForPeople(t *testing.T) {
	for text, want := range map[string]string{
		request: "03:04:05.678 409 update deployments/status ns/web shard=op-1-normal added=1.5ms bytes=321",
		`{"time":"2026-01-02T03:04:05Z","msg":"stream begins","pod":"team/op-0","verb":"watch","resource":"pods","subresource":"","namespace":"","name":""}`:                                                     "03:04:05.000 - watch pods - (stream begins)",
		`{"time":"2026-01-02T03:04:05Z","msg":"request","pod":"team/op-0","code":200,"added":0,"bytes":2}`:                                                                                                       "03:04:05.000 200 - - - added=0s bytes=2",
		`{"time":"2026-01-02T03:04:05Z","msg":"request","pod":"team/op-0","cluster":"m1","verb":"get","resource":"nodes","name":"n","code":429,"limited_by":"b/rule","faults":["f/a","f/b"],"dry_run":"refuse"}`: "03:04:05.000 429 get nodes n cluster=m1 added=0s bytes=0 limited_by=b/rule faults=f/a,f/b dry_run=refuse",
		`{"time":"2026-01-02T03:04:05Z","msg":"egress","pod":"team/op-0","protocol":"https","host":"example.com","to":"192.0.2.1:443","verdict":"denied","rule":"b/hosts","code":403,"error":"closed"}`:          "03:04:05.000 403 https example.com 192.0.2.1:443 denied rule=b/hosts error=closed",
		`{"time":"2026-01-02T03:04:05Z","msg":"request","pod":"team/op-0","verb":"get","resource":"pods","namespace":"ns","name":"\u001b[31mred\u0007\u202e\n","code":200}`:                                      `03:04:05.000 200 get pods ns/\x1b[31mred\a\u202e\n added=0s bytes=0`,
		fmt.Sprintf(`{"time":"2026-01-02T03:04:05Z","msg":"request","pod":"team/op-0","verb":"get","resource":"pods","name":%q,"code":200}`, strings.Repeat("a", 2*maxText)):                                     "03:04:05.000 200 get pods " + strings.Repeat("a", maxText) + "... added=0s bytes=0",
	} {
		line, ok := Parse([]byte(text))
		require.True(t, ok, text)
		require.Equal(t, want, line.String())
	}
	for _, text := range []string{
		"", "panic: oops", "{}", `{"msg":"request"}`, `{"msg":"started","pod":"team/op-0"}`, `{"msg":"request","pod":"team/op-0","code":"200"}`, `{"msg":"request","pod":"team/op-0"`,
		`{"msg":"request","pod":"team/op-0","name":"` + strings.Repeat("a", maxLine) + `"}`,
	} {
		_, ok := Parse([]byte(text))
		require.False(t, ok, "%.80s", text)
	}
}

func TestFilters(t *testing.T) {
	line, ok := Parse([]byte(request))
	require.True(t, ok)
	for _, c := range []struct {
		filter Filter
		want   bool
	}{
		{Filter{}, true},
		{Filter{Pod: "team/op-1"}, false},
		{Filter{Verbs: []string{"get", "update"}}, true},
		{Filter{Verbs: []string{"get"}}, false},
		{Filter{Resources: []string{"deployments"}}, true},
		{Filter{Resources: []string{"deployments/status"}}, true},
		{Filter{Resources: []string{"deployments/scale"}}, false},
		{Filter{Codes: []string{"200", "409"}}, true},
		{Filter{Codes: []string{"4xx"}}, true},
		{Filter{Codes: []string{"5xx"}}, false},
		{Filter{Verbs: []string{"update"}, Codes: []string{"200"}}, false},
	} {
		if c.filter.Pod == "" {
			c.filter.Pod = "team/op-0"
		}
		require.NoError(t, c.filter.Check())
		require.Equal(t, c.want, c.filter.Selects(line), "%+v", c.filter)
	}
	stream := line
	stream.Code = 0
	require.False(t, Filter{Pod: "team/op-0", Codes: []string{"4xx"}}.Selects(stream))
	for _, code := range []string{"", "4", "4x", "xxx", "099", "600", "40x", "-40", "4xx0"} {
		require.Error(t, Filter{Codes: []string{code}}.Check(), code)
	}
	require.ErrorContains(t, Filter{Verbs: []string{"get", "watchh"}}.Check(), `unknown verb "watchh"`)
}

func TestLongLinesAreSkipped(t *testing.T) {
	var got []string
	log := "first\r\n\n" + strings.Repeat("a", 3*maxLine) + "\nsecond\nlast"
	require.NoError(t, Lines(strings.NewReader(log), func(text []byte) error {
		got = append(got, string(text))
		return nil
	}))
	require.Equal(t, []string{"first", "second", "last"}, got)
	require.ErrorContains(t, Lines(strings.NewReader(log), func([]byte) error { return fmt.Errorf("stop") }), "stop")
	require.ErrorContains(t, Lines(failing{}, func([]byte) error { return nil }), "broken")
}

type failing struct{}

func (failing) Read([]byte) (int, error) { return 0, fmt.Errorf("broken") }

func TestRawLinesKeepTheirValues(t *testing.T) {
	text, err := Raw([]byte("{ \"name\":\t\"\u009b31m\u202e\U000e0001é\" }"))
	require.NoError(t, err)
	require.Equal(t, `{"name":"\u009b31m\u202e\udb40\udc01é"}`, text)
	var back struct{ Name string }
	require.NoError(t, json.Unmarshal([]byte(text), &back))
	require.Equal(t, "\u009b31m\u202e\U000e0001é", back.Name)
	_, err = Raw([]byte("no JSON"))
	require.Error(t, err)
}

// Whatever is in a log, nothing reaches the terminal that it does not print.
func FuzzLine(f *testing.F) {
	f.Add([]byte(request))
	f.Add([]byte(`{"msg":"egress","pod":"a/b","host":"\u001b]0;title\u0007","error":"\u202e"}`))
	f.Add([]byte("{\"msg\":\"request\",\"pod\":\"a/b\",\"name\":\"\x9b\xff\u009b\"}"))
	f.Fuzz(func(t *testing.T, text []byte) {
		line, ok := Parse(text)
		if !ok {
			return
		}
		out := line.String()
		require.True(t, utf8.ValidString(out))
		require.Less(t, len(out), 64*4*maxText)
		raw, err := Raw(text)
		require.NoError(t, err)
		for _, r := range out + raw {
			require.True(t, unicode.IsPrint(r), "%q", r)
		}
		require.True(t, json.Valid([]byte(raw)))
		require.False(t, bytes.ContainsRune([]byte(out), '\n'))
	})
}
