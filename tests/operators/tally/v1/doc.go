// Package v1 holds Tally, the kind that the test operator reconciles. Its status
// is a record of who reconciled the object, which is how tests see what reached
// which pod.
package v1
