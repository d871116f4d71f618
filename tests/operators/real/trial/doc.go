// Package trial takes a published operator through adoption by the mesh and judges the result.
//
// An operator runs unlabelled first, over one set of namespaces, whose end state is the reference.
// Then a second set of namespaces gets the same objects. While these change, the operator is adopted
// by a rolling update, divided, rescaled, deprived of a leader and removed again. The audit log of
// the apiserver shows who wrote what, and the end state of the second set must equal the reference.
package trial
