// Package match tells which rules are about a request. It is pure, and what it
// compiles is immutable.
//
// A rule has entries, any of which may match. What an entry asks of a request is of
// two kinds: what a plan knows (verb and resource) and what only the request does.
// So that a request pays for the rules that may be about it alone, the first is
// asked once for each plan ([Resource.Of]).
package match
