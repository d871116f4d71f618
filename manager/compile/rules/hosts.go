package rules

import (
	"regexp/syntax"
	"slices"
	"unicode"
)

// hosts is the set of states that the alternatives of an expression may be in, after the
// part that was read.
type hosts uint8

const (
	ofEither  hosts = 1 << iota // hexadecimal digits: a name or an IPv6 address
	ofName                      // a name or an IPv4 address
	ofPort                      // hexadecimal digits, ":" and digits: a port, unless more follows
	ofAddress                   // an IPv6 address
	ofNone                      // no host: the expression requires a port or a path
)

// hostless reports whether an expression, or one of its alternatives, matches no host.
func hostless(re *syntax.Regexp) bool { return ofEither.then(re)&(ofPort|ofNone) != 0 }

// then reads an expression. It reads alternatives from the current state, because the
// parser factors out their common prefixes.
func (h hosts) then(re *syntax.Regexp) (out hosts) {
	switch {
	case re.Op == syntax.OpAlternate:
		for _, sub := range re.Sub {
			out |= h.then(sub)
		}
		return out
	case re.Op == syntax.OpStar, re.Op == syntax.OpQuest, re.Op == syntax.OpRepeat && re.Min == 0:
		return h.perhaps(re)
	}
	for _, class := range classes(re) {
		h = h.next(class)
	}
	for _, sub := range re.Sub {
		h = h.then(sub)
	}
	if re.Op == syntax.OpPlus || re.Op == syntax.OpRepeat && re.Max != 1 {
		h = h.perhaps(re)
	}
	return h
}

// perhaps reads an optional part: any of its characters, or a digit, which distinguishes
// nothing.
func (h hosts) perhaps(re *syntax.Regexp) hosts {
	class := []rune{'0', '0'}
	var add func(*syntax.Regexp)
	add = func(re *syntax.Regexp) {
		for _, c := range classes(re) {
			class = append(class, c...)
		}
		for _, sub := range re.Sub {
			add(sub)
		}
	}
	add(re)
	return h.next(class)
}

// next reads one character of a class, which is written as in [syntax.Regexp].
func (h hosts) next(class []rune) (out hosts) {
	c := contentOf(class)
	for state := ofEither; state <= ofNone; state <<= 1 {
		if h&state != 0 {
			out |= state.after(c)
		}
	}
	return out
}

// after returns what follows from a single state and a character.
func (h hosts) after(c content) hosts {
	if c.slash {
		return ofNone
	}
	asksForColon := c.colon && !c.digit && !c.letter && !c.other
	switch h {
	case ofEither:
		switch {
		case c.other:
			return ofName
		case asksForColon:
			return ofPort
		case c.colon:
			return ofAddress
		}
	case ofName:
		if asksForColon {
			return ofNone
		}
	case ofPort:
		switch {
		case c.colon || c.letter:
			return ofAddress
		case !c.digit:
			return ofNone
		}
	}
	return h
}

// content describes what a class of characters contains: a colon, decimal digits,
// hexadecimal letters, other characters, or "/" alone.
type content struct{ colon, digit, letter, other, slash bool }

func contentOf(class []rune) content {
	c := content{slash: slices.Equal(class, []rune{'/', '/'})}
	for r := range slices.Chunk(class, 2) {
		has := func(from, to rune) bool { return r[0] <= to && r[1] >= from }
		within := func(from, to rune) bool { return r[0] >= from && r[1] <= to }
		c.colon = c.colon || has(':', ':')
		c.digit = c.digit || has('0', '9')
		c.letter = c.letter || has('a', 'f') || has('A', 'F')
		c.other = c.other || !within('0', ':') && !within('a', 'f') && !within('A', 'F') // ":" follows "9"
	}
	return c
}

// classes returns the classes of characters that an expression itself matches, in order.
func classes(re *syntax.Regexp) (out [][]rune) {
	switch re.Op {
	case syntax.OpLiteral:
		for _, c := range re.Rune {
			out = append(out, []rune{c, c})
		}
	case syntax.OpCharClass:
		out = append(out, re.Rune)
	case syntax.OpAnyChar, syntax.OpAnyCharNotNL:
		out = append(out, []rune{0, unicode.MaxRune})
	}
	return out
}
