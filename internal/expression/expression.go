// Package expression bounds regular expressions that users write, so that none takes much
// longer to match than others.
package expression

import (
	"fmt"
	"regexp"
	"regexp/syntax"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/intern"
)

const (
	// Max is the maximum length of an expression in bytes.
	Max = 2000
	// MaxProgram is how many instructions an expression may have. Each may be run for each
	// character of a text. An expression of 1024 characters has fewer, unless it repeats.
	MaxProgram = 1200
)

// size returns roughly how many steps an expression has when its repetitions are expanded. It
// stops counting above Max.
func size(re *syntax.Regexp) int {
	n := 1 + len(re.Rune)/2
	if re.Op == syntax.OpLiteral {
		n = 1 + len(re.Rune)
	}
	for _, sub := range re.Sub {
		n = min(n+size(sub), Max+1)
	}
	if re.Op == syntax.OpRepeat {
		n *= max(re.Min, re.Max, 1)
	}
	return min(n, Max+1)
}

// Expression is a compiled expression.
type Expression struct {
	*regexp.Regexp
	// Program is how many instructions it has.
	Program int
}

// Whole is a compiled expression that matches whole texts.
type Whole struct {
	Expression
	// HostSteps and PathSteps are how many instructions run at most to match a host or a path
	// of the maximum length.
	HostSteps, PathSteps int
}

// The expressions in use. Many policies have the same ones, and each is compiled more than
// once.
var (
	compiled intern.Map[Expression]
	wholes   intern.Map[Whole]
)

// Compile compiles an expression that is not too large.
func Compile(s string) (*Expression, error) {
	if len(s) > Max {
		return nil, errLong
	}
	return compiled.Get(s, func(s string) (*Expression, error) {
		_, e, err := compile(s)
		return e, err
	})
}

// CompileWhole compiles an expression for hosts or paths that is not too large.
func CompileWhole(s string) (*Whole, error) {
	if len(s) > Max {
		return nil, errLong
	}
	return wholes.Get(s, func(s string) (*Whole, error) {
		program, e, err := compile("^(?:" + s + ")$")
		if err != nil {
			return nil, err
		}
		steps := newSteps(program)
		return &Whole{*e, steps.of(meshv1.MaxMatchedHost), steps.of(meshv1.MaxMatchedPath)}, nil
	})
}

var errLong = fmt.Errorf("it has more than %d characters: write less, or several expressions", Max)

func compile(s string) (*syntax.Prog, *Expression, error) {
	parsed, err := syntax.Parse(s, syntax.Perl)
	if err != nil {
		return nil, nil, err
	}
	tooLarge := func(atLeast string, n int) error {
		return fmt.Errorf("it compiles to %s%d instructions, and at most %d are permitted: repeat less, or match without an expression", atLeast, n, MaxProgram)
	}
	if size(parsed) > Max { // it is not compiled, which would take as long
		return nil, nil, tooLarge("more than ", Max)
	}
	program, err := syntax.Compile(parsed.Simplify())
	if err != nil {
		return nil, nil, err
	}
	if len(program.Inst) > MaxProgram {
		return nil, nil, tooLarge("", len(program.Inst))
	}
	re, err := regexp.Compile(s)
	if err != nil {
		return nil, nil, err
	}
	return program, &Expression{re, len(program.Inst)}, nil
}
