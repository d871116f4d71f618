package repo

import (
	"bytes"
	"errors"
	"os/exec"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Whatever takes long shows that it goes on, and its output and status stay its own.
func TestProgressIsShownWhileACommandRuns(t *testing.T) {
	cmd := exec.Command("../../hack/progress.sh", "waiting", "sh", "-c", "sleep 2.5; echo done; exit 7")
	cmd.Env = append(cmd.Environ(), "PROGRESS_INTERVAL=1")
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	var exit *exec.ExitError
	require.True(t, errors.As(err, &exit), "%v", err)
	assert.Equal(t, 7, exit.ExitCode())
	assert.Equal(t, "done\n", stdout.String())
	assert.Contains(t, stderr.String(), "... waiting: 1 s\n")
	assert.Contains(t, stderr.String(), "... waiting: 2 s\n")
}
