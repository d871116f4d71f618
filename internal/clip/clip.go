// Package clip shortens lists in messages.
package clip

import (
	"fmt"
	"strings"
)

// Join joins the first texts, at most some, and says how many more there are.
func Join(texts []string, most int, separator string) string {
	out := strings.Join(texts[:min(len(texts), most)], separator)
	if more := len(texts) - most; more > 0 {
		out += fmt.Sprintf(" and %d more", more)
	}
	return out
}
