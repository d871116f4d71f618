// Package expression bounds regular expressions that users write.
package expression

import (
	"fmt"
	"regexp"
	"regexp/syntax"
)

// Max is the maximum [Size] of an expression, and its maximum length in bytes.
const Max = 2000

// Size returns roughly how many steps an expression has when its repetitions are expanded. It
// stops counting above Max.
func Size(re *syntax.Regexp) int {
	size := 1 + len(re.Rune)/2
	if re.Op == syntax.OpLiteral {
		size = 1 + len(re.Rune)
	}
	for _, sub := range re.Sub {
		size = min(size+Size(sub), Max+1)
	}
	if re.Op == syntax.OpRepeat {
		size *= max(re.Min, re.Max, 1)
	}
	return min(size, Max+1)
}

// Compile compiles an expression that is not too large.
func Compile(s string) (*regexp.Regexp, error) {
	if len(s) > Max {
		return nil, fmt.Errorf("it has more than %d characters", Max)
	}
	re, err := syntax.Parse(s, syntax.Perl)
	if err != nil {
		return nil, err
	}
	if Size(re) > Max {
		return nil, fmt.Errorf("it has more than %d steps: repeat less", Max)
	}
	return regexp.Compile(s)
}
