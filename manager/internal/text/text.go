// Package text bounds texts that others supply.
package text

import "strings"

// Bounded truncates a text to most bytes.
func Bounded(s string, most int) string {
	if len(s) <= most {
		return s
	}
	return strings.ToValidUTF8(s[:most], "") + "..."
}
