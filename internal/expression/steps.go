package expression

import (
	"regexp/syntax"
	"slices"
	"unicode"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

// Bounds on what counting takes. Above them, every instruction counts as one that reads any
// character, which counts too many steps.
const (
	// maxClasses is how many classes of characters a program may distinguish.
	maxClasses = 64
	// maxWork is how many instructions may be tried.
	maxWork = 1 << 21
)

// steps counts how many instructions of an anchored program run at most for a text. It reads
// all texts at once: after each character, it knows which instructions may wait for the next
// one. The most that can run are those that wait for the same character.
type steps struct {
	program *syntax.Prog
	classes []rune // one character of each class; nil: too many
	seen    []int  // by instruction: the last turn that ran it
	turn    int
	ran     int // instructions of this turn
	// listed is, by instruction, the last position after which it may wait.
	listed         []int
	position, work int
}

func newSteps(program *syntax.Prog) *steps {
	return &steps{program: program, classes: classesOf(program), seen: make([]int, len(program.Inst)), listed: make([]int, len(program.Inst))}
}

// of returns the number for texts of at most n characters. It stops counting above
// [meshv1.MaxMatchSteps].
func (s *steps) of(n int) (total int) {
	s.begin()
	s.position++
	waiting := s.run(nil, uint32(s.program.Start))
	total = s.ran
	for i := range n {
		next, most := s.read(waiting)
		if len(next) == 0 && most == 0 {
			break // no longer text matches
		}
		most++ // the start is tried at each character
		if slices.Equal(next, waiting) {
			return min(total+(n-i)*most, meshv1.MaxMatchSteps+1)
		}
		if total += most; total > meshv1.MaxMatchSteps {
			break
		}
		waiting = next
	}
	return min(total, meshv1.MaxMatchSteps+1)
}

// read returns which instructions may wait after a further character, sorted, and how many run
// at most for it.
func (s *steps) read(waiting []uint32) (next []uint32, most int) {
	if s.work > maxWork {
		s.classes = nil
	}
	s.position++
	if s.classes == nil {
		s.begin()
		for _, pc := range waiting {
			next = s.run(next, s.program.Inst[pc].Out)
		}
		most = s.ran
	}
	for _, c := range s.classes {
		s.begin()
		for _, pc := range waiting {
			if i := &s.program.Inst[pc]; i.MatchRune(c) {
				next = s.run(next, i.Out)
			}
		}
		most = max(most, s.ran)
		s.work += len(waiting) + s.ran
	}
	slices.Sort(next)
	return next, most
}

func (s *steps) begin() { s.turn, s.ran = s.turn+1, 0 }

// run runs the instructions from pc on up to those that wait for a character, which it
// appends to waiting.
func (s *steps) run(waiting []uint32, pc uint32) []uint32 {
	if s.seen[pc] == s.turn {
		return waiting
	}
	s.seen[pc] = s.turn
	s.ran++
	switch i := &s.program.Inst[pc]; i.Op {
	case syntax.InstAlt, syntax.InstAltMatch:
		return s.run(s.run(waiting, i.Out), i.Arg)
	case syntax.InstCapture, syntax.InstNop, syntax.InstEmptyWidth:
		return s.run(waiting, i.Out)
	case syntax.InstFail, syntax.InstMatch:
		return waiting
	}
	if s.listed[pc] == s.position {
		return waiting
	}
	s.listed[pc] = s.position
	return append(waiting, pc)
}

// classesOf returns a character of each class of those that a program distinguishes, or nil if
// there are more than maxClasses.
func classesOf(program *syntax.Prog) []rune {
	classes := map[rune]bool{0: true, '\n': true, '\n' + 1: true}
	for _, i := range program.Inst {
		if i.Op != syntax.InstRune && i.Op != syntax.InstRune1 {
			continue
		}
		for n, c := range i.Rune {
			if len(i.Rune) > 1 && n%2 == 1 { // the end of a range
				c++
			}
			classes[c] = true
			if len(i.Rune) == 1 {
				classes[c+1] = true
				for f := unicode.SimpleFold(c); f != c; f = unicode.SimpleFold(f) {
					classes[f], classes[f+1] = true, true
				}
			}
		}
		if len(classes) > maxClasses {
			return nil
		}
	}
	out := make([]rune, 0, len(classes))
	for c := range classes {
		out = append(out, c)
	}
	return out
}
