// Package decide decides what becomes of a root. It is pure: no I/O, no client, no clock of
// its own. Package roots gathers its input and carries out its decisions.
package decide
