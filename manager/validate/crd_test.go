package validate

import (
	"testing"

	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/ctrlmesh/ctrlmesh/manager/internal/crdtest"
)

// crd judges objects as the apiserver does, after it has pruned them and filled in defaults.
type crd struct{ *crdtest.CRD }

func newCRD(t testing.TB, plural string) crd {
	t.Helper()
	return crd{crdtest.Load(t, "ctrlmesh.kusionstack.io_"+plural)}
}

// admit fills in defaults, and finds what the apiserver would.
func (c crd) admit(o map[string]any) field.ErrorList {
	_, errs := c.Admit(o)
	return errs
}

func TestCRDs(t *testing.T) {
	for _, plural := range []string{"circuitbreakers", "faultinjections", "shardingconfigs"} {
		newCRD(t, plural)
	}
}
