package netns_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/ctrlmesh/ctrlmesh/agent/capture/netns"
	"github.com/ctrlmesh/ctrlmesh/agent/internal/netnstest"
)

// A pod that gives itself many addresses takes no more room in the table of all pods than others.
func TestAddressesAreBounded(t *testing.T) {
	n := netnstest.New(t)
	var many []string
	for i := range 300 {
		many = append(many, fmt.Sprintf("10.1.%d.%d/32", i/200, i%200+1))
	}
	n.Up("lo", many...)
	found, err := netns.Addresses(n.File)
	require.NoError(t, err)
	require.Len(t, found, 256)
}
