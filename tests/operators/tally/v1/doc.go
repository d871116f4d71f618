// Package v1 defines Tally, the kind that the test operator reconciles. Its status records
// the pods that reconciled the object, by which tests see which objects reached which pod.
package v1
