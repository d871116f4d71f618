package report

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestVersionIsTheTagOrTheDigest(t *testing.T) {
	for image, want := range map[string]string{
		"localhost/ctrlmesh/agent:dev":            "dev",
		"registry:5000/ctrlmesh/agent:v1.2.3":     "v1.2.3",
		"registry:5000/ctrlmesh/agent":            "latest",
		"registry/agent:v1@sha256:0123":           "v1",
		"registry:5000/ctrlmesh/agent@sha256:abc": "sha256:abc",
	} {
		require.Equal(t, want, VersionOfImage(image), image)
	}
}
