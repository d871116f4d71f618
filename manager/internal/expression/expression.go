// Package expression bounds regular expressions that users write.
package expression

import (
	"fmt"
	"regexp"
	"regexp/syntax"

	"github.com/ctrlmesh/ctrlmesh/internal/intern"
)

const (
	// Max is the maximum [Size] of an expression, and its maximum length in bytes.
	Max = 2000
	// MaxProgram is how many instructions the expressions of one list of matches may have
	// together. Each may be run for each character of a name. An expression of 1024 characters
	// has fewer, unless it repeats.
	MaxProgram = 1200
)

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

// Expression is a compiled expression.
type Expression struct {
	*regexp.Regexp
	// Program is how many instructions it has.
	Program int
}

// compiled are the expressions in use: each compilation of policies needs all of them.
var compiled intern.Map[Expression]

// Compile compiles an expression that is not too large.
func Compile(s string) (*Expression, error) {
	if len(s) > Max {
		return nil, fmt.Errorf("it has more than %d characters: write less, or several expressions", Max)
	}
	return compiled.Get(s, compile)
}

func compile(s string) (*Expression, error) {
	parsed, err := syntax.Parse(s, syntax.Perl)
	if err != nil {
		return nil, err
	}
	tooLarge := func(atLeast string, n int) error {
		return fmt.Errorf("it compiles to %s%d instructions, and at most %d are permitted: repeat less, or match by names or labels", atLeast, n, MaxProgram)
	}
	if Size(parsed) > Max { // it is not compiled, which would take as long
		return nil, tooLarge("more than ", Max)
	}
	program, err := syntax.Compile(parsed.Simplify())
	if err != nil {
		return nil, err
	}
	if len(program.Inst) > MaxProgram {
		return nil, tooLarge("", len(program.Inst))
	}
	re, err := regexp.Compile(s)
	if err != nil {
		return nil, err
	}
	return &Expression{re, len(program.Inst)}, nil
}
