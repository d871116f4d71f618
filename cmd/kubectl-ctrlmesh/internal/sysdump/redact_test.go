package sysdump

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestArgumentsKeepNamesOfFlags(t *testing.T) {
	for words, want := range map[string]string{
		"/manager|--leader-elect|--token=a|-v=4": "/manager|--leader-elect|--token=REDACTED|-v=REDACTED",
		"/manager|--token|a|positional":          "/manager|--token|REDACTED|REDACTED",
		"sh|-c|TOKEN=a exec /manager":            "sh|-c|REDACTED",
		"TOKEN=a /manager":                       "TOKEN=REDACTED",
	} {
		var in, out []string
		var raw []any
		for w := range strings.SplitSeq(words, "|") {
			in, raw = append(in, w), append(raw, w)
		}
		for _, w := range arguments(raw) {
			word, ok := w.(string)
			require.True(t, ok)
			out = append(out, word)
		}
		require.Len(t, out, len(in))
		require.Equal(t, want, strings.Join(out, "|"))
	}
}

func TestScrubReplacesSecrets(t *testing.T) {
	for text, want := range map[string]string{
		"https://user:word@host/path":                                     "https://REDACTED@host/path",
		"https://host/path?mail=a@b":                                      "https://host/path?mail=a@b",
		"Authorization: bearer abcdefgh.ijkl":                             "Authorization: REDACTED",
		"the bearer of news":                                              "the bearer of news",
		"token eyJhbGciOiJSUzI1.eyJpc3Mi.c2lnbmF0 end":                    "token REDACTED end",
		"-----BEGIN RSA PRIVATE KEY-----\nabc":                            "REDACTED",
		"a -----BEGIN PRIVATE KEY-----\nabc\n-----END PRIVATE KEY----- b": "a REDACTED b",
		"-----BEGIN CERTIFICATE-----\nabc":                                "-----BEGIN CERTIFICATE-----\nabc",
	} {
		require.Equal(t, want, scrub(text))
	}
}
