// Package check finds mistakes of the operator sloppy by its objects alone.
package check

import (
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
)

const (
	// ClaimLabel marks a claim, whatever its value.
	ClaimLabel = "sloppy.example.com/claim"
	// ChildLabel on a child is the name of its claim.
	ChildLabel = "sloppy.example.com/child-of"
	// DoneAnnotation on a claim says that its child was created.
	DoneAnnotation = "sloppy.example.com/done"
)

// Wrong returns the mistakes in a namespace's ConfigMaps, once the operator had time to
// finish; none if all are correct. A claim that is not done yet is no mistake.
func Wrong(all []corev1.ConfigMap) []string {
	claims, children := map[string]bool{}, map[string]int{}
	for _, m := range all {
		if _, ok := m.Labels[ClaimLabel]; ok {
			claims[m.Name] = m.Annotations[DoneAnnotation] != ""
		}
		if claim, ok := m.Labels[ChildLabel]; ok {
			children[claim]++
		}
	}
	var wrong []string
	for claim, done := range claims {
		switch n := children[claim]; {
		case n > 1:
			wrong = append(wrong, fmt.Sprintf("claim %s has %d children", claim, n))
		case n == 0 && done:
			wrong = append(wrong, fmt.Sprintf("claim %s is recorded as done and has no child", claim))
		}
	}
	for claim := range children {
		if _, ok := claims[claim]; !ok {
			wrong = append(wrong, fmt.Sprintf("claim %s is deleted and still has a child", claim))
		}
	}
	slices.Sort(wrong)
	return wrong
}
