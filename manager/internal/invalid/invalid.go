// Package invalid describes invalid objects to their authors.
package invalid

import (
	"fmt"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/ctrlmesh/ctrlmesh/manager/internal/text"
)

const (
	// maxErrors is how many errors Message lists.
	maxErrors = 8
	// maxError bounds each in bytes: it quotes the invalid value.
	maxError = 4 << 10
)

// Message returns a message with the first of some errors of an object, and the number of the
// others: anybody can send an object with a million of them.
func Message(errs field.ErrorList) string {
	listed := errs[:min(len(errs), maxErrors)]
	messages := make([]string, 0, len(listed)+1)
	for _, err := range listed {
		messages = append(messages, text.Bounded(err.Error(), maxError))
	}
	if more := len(errs) - len(listed); more > 0 {
		messages = append(messages, fmt.Sprintf("and %d more", more))
	}
	out := strings.Join(messages, ", ")
	if len(messages) > 1 {
		out = "[" + out + "]" // as in errors of Kubernetes
	}
	return out
}
