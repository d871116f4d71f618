// Package text bounds and checks texts that others supply.
package text

import (
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"
)

// Bounded truncates a text to most bytes.
func Bounded(s string, most int) string {
	if len(s) <= most {
		return s
	}
	return strings.ToValidUTF8(s[:most], "") + "..."
}

// NamesResource reports whether a resource can have such a name, in such a group.
func NamesResource(group, resource string) bool {
	return (group == "" || len(validation.IsDNS1123Subdomain(group)) == 0) && len(validation.IsDNS1123Label(resource)) == 0
}
