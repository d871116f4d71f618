package validate

import (
	"testing"

	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/defaulting"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/pruning"
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
	pruning.Prune(o, c.Structural, true)
	defaulting.Default(o, c.Structural)
	return c.Validate(o)
}

func TestCRDs(t *testing.T) {
	for _, plural := range []string{"circuitbreakers", "faultinjections", "shardingconfigs"} {
		newCRD(t, plural)
	}
}
