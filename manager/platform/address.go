package platform

import (
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/ctrlmesh/ctrlmesh/internal/collect"
)

const (
	maxAddresses = 16
	defaultPort  = 443
)

// Address is where clients reach the apiserver, as they name it.
type Address struct {
	// Host is a literal address, unmapped and without a zone, or a DNS name in lower case.
	Host string
	Port uint16
}

// UnmarshalJSON reads HOST or HOST:PORT. IPv6 addresses with a port are in brackets.
func (a *Address) UnmarshalJSON(b []byte) error {
	var text string
	if err := json.Unmarshal(b, &text); err != nil {
		return fmt.Errorf("%s: %w", APIServerAddresses, err)
	}
	parsed, ok := parseAddress(text)
	if !ok {
		return fmt.Errorf("%s: invalid address %q: write HOST or HOST:PORT, where HOST is an IP address or a DNS name", APIServerAddresses, text)
	}
	*a = parsed
	return nil
}

// MarshalJSON writes HOST:PORT.
func (a Address) MarshalJSON() ([]byte, error) { return json.Marshal(a.String()) }

// String returns HOST:PORT.
func (a Address) String() string { return net.JoinHostPort(a.Host, strconv.Itoa(int(a.Port))) }

// Hosts returns the hosts of the addresses, sorted.
func (s APIServer) Hosts() []string {
	hosts := collect.Map(s.Addresses, func(a Address) string { return a.Host })
	slices.Sort(hosts)
	return slices.Compact(hosts)
}

func parseAddress(text string) (a Address, ok bool) {
	if host, ok := parseHost(text); ok {
		return Address{Host: host, Port: defaultPort}, true
	}
	host, port, err := net.SplitHostPort(text)
	if err != nil {
		return a, false
	}
	number, err := strconv.ParseUint(port, 10, 16)
	if err != nil || number == 0 {
		return a, false
	}
	host, ok = parseHost(host)
	return Address{Host: host, Port: uint16(number)}, ok
}

func parseHost(text string) (host string, ok bool) {
	if ip, err := netip.ParseAddr(text); err == nil {
		ip = ip.Unmap()
		return ip.String(), ip.Zone() == "" && ip.IsGlobalUnicast()
	}
	host = strings.ToLower(strings.TrimSuffix(text, "."))
	if len(validation.IsDNS1123Subdomain(host)) > 0 {
		return "", false
	}
	// Clients read a name that ends in a number as an address, each in its own way.
	last := host[strings.LastIndexByte(host, '.')+1:]
	return host, last[0] < '0' || last[0] > '9'
}
