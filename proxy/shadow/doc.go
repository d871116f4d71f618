// Package shadow compares the writes of a shadow with what others write.
//
// A shadow is a version of an operator whose writes are dry runs. What such a write would have
// changed is compared with the object as it is then read, for a time: others may make the same
// change. Values are compared by their hashes, and only paths of fields are reported.
//
//	object.go      objects as fields, and what a write changes of them
//	options.go     dry runs of deletions
//	comparison.go  what a shadow wants of one object
//	comparer.go    the comparisons of a pod, and when objects are read
//	counts.go      how writes ended
package shadow
