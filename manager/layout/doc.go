// Package layout says what shards a root configuration means: their names, how
// many pods each has and which, and what each is to hold. It weighs and cuts the
// key space so that shards have alike much to do.
//
// It is pure.
package layout
