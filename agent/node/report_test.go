package node

import (
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/lock"
)

func TestReportHasTheRefusalsOfLocks(t *testing.T) {
	require.Empty(t, lockRefusals(nil))
	out := lockRefusals([]lock.Refusal{{Namespace: "kube-system", Name: "op", Resource: "configmaps", Verb: "update", Code: 403, Message: "no"}})
	require.Len(t, out, 1)
	require.True(t, proto.Equal(&meshv1.LockRefusal{Namespace: "kube-system", Name: "op", Resource: "configmaps", Verb: "update", Code: 403, Message: "no"}, out[0]))
}
