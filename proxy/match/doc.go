// Package match reports whether rules match a request. It is pure, and what it compiles
// is immutable.
//
// A rule has entries, and matches if any of them does. The conditions of an entry are of
// two kinds: those about what a plan knows (verb and resource), and those about what only
// the request contains. The former are evaluated once for each plan ([Resource.Of]), so
// that a request pays only for the rules that may match it.
package match
