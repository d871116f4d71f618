package match

import (
	"regexp"

	"github.com/ctrlmesh/ctrlmesh/internal/intern"
)

// expressions are the expressions in use. Many pods have the same ones, and a policy is
// compiled more than once.
var expressions intern.Map[regexp.Regexp]

// expressionOf returns an expression that matches whole strings.
func expressionOf(text string) (*regexp.Regexp, error) {
	return expressions.Get(text, func(text string) (*regexp.Regexp, error) { return regexp.Compile(`^(?:` + text + `)$`) })
}
