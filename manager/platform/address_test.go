package platform

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestAddresses(t *testing.T) {
	for text, want := range map[string]string{
		"192.0.2.1":              "192.0.2.1:443",
		"192.0.2.1:6443":         "192.0.2.1:6443",
		"::ffff:192.0.2.1":       "192.0.2.1:443",
		"fd00::1":                "[fd00::1]:443",
		"[fd00::1]:6443":         "[fd00::1]:6443",
		"api.example.com":        "api.example.com:443",
		"API.example.com.":       "api.example.com:443",
		"api.example.com:6443":   "api.example.com:6443",
		"":                       "",
		":443":                   "",
		"192.0.2":                "",
		"127.0.0.1":              "",
		"0.0.0.0":                "",
		"169.254.169.254":        "",
		"fe80::1%eth0":           "",
		"api.example.com:0":      "",
		"api.example.com:99999":  "",
		"api.example.com:https":  "",
		"https://api.example":    "",
		"*.example.com":          "",
		"api_internal.example":   "",
		"api.example.com/path":   "",
		"host with blanks":       "",
		strings.Repeat("a", 300): "",
	} {
		s, err := Parse(map[string]string{Key: fmt.Sprintf("apiserver: {addresses: [%q]}", text)})
		if want == "" {
			require.ErrorContains(t, err, "apiserver.addresses", text)
			continue
		}
		require.NoError(t, err, text)
		require.Len(t, s.APIServer.Addresses, 1)
		require.Equal(t, want, s.APIServer.Addresses[0].String())
	}
}

func TestAddressesAreBounded(t *testing.T) {
	list := func(n int) map[string]string {
		return map[string]string{Key: "apiserver: {addresses: [" + strings.TrimSuffix(strings.Repeat("api.example.com, ", n), ", ") + "]}"}
	}
	_, err := Parse(list(maxAddresses))
	require.NoError(t, err)
	_, err = Parse(list(maxAddresses + 1))
	require.ErrorContains(t, err, "at most 16")
}

func TestHostsAreNamedOnce(t *testing.T) {
	s, err := Parse(map[string]string{Key: "apiserver: {addresses: ['b.example:1', '192.0.2.1', 'b.example:2']}"})
	require.NoError(t, err)
	require.Equal(t, []string{"192.0.2.1", "b.example"}, s.APIServer.Hosts())
}
