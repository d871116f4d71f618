package validate

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"
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

// judge returns the errors that admission finds in a ShardingConfig: by the schema, and then by the
// webhook.
func (c crd) judge(t *testing.T, spec string) error {
	t.Helper()
	o := object(t, "ShardingConfig", spec)
	if errs := c.admit(o); len(errs) > 0 {
		return errs.ToAggregate()
	}
	data, err := json.Marshal(o)
	require.NoError(t, err)
	admitted := config(t, "r", "")
	require.NoError(t, json.Unmarshal(data, admitted))
	admitted.Namespace = "ns"
	return Config(admitted).ToAggregate()
}

// update returns the errors that the schema finds in a change of a ShardingConfig.
func (c crd) update(t *testing.T, old, spec string) error {
	t.Helper()
	return c.Update(object(t, "ShardingConfig", old), object(t, "ShardingConfig", spec)).ToAggregate()
}

func TestCRDs(t *testing.T) {
	for _, plural := range []string{"circuitbreakers", "faultinjections", "shardingconfigs"} {
		newCRD(t, plural)
	}
}
