package invalid

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

func TestMessageListsFewErrors(t *testing.T) {
	path := field.NewPath("spec", "names")
	var errs field.ErrorList
	for i := range 100_000 {
		errs = append(errs, field.Required(path.Index(i), "write a name"))
	}
	require.Equal(t, errs[:1].ToAggregate().Error(), Message(errs[:1]))
	require.Equal(t, errs[:3].ToAggregate().Error(), Message(errs[:3]))
	message := Message(errs)
	require.Contains(t, message, "spec.names[7]: Required value: write a name, and 99992 more]")
	require.NotContains(t, message, "spec.names[8]")
}

func TestMessageShortensValues(t *testing.T) {
	long := field.Invalid(field.NewPath("spec"), strings.Repeat("ä", 1<<20), "must be shorter")
	require.Less(t, len(Message(field.ErrorList{long, long})), 3*maxError)
}
