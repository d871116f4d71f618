package repo

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Whatever takes long shows that it goes on, and its output and status stay its own.
func TestProgressIsShownWhileACommandRuns(t *testing.T) {
	stderr, err := os.Create(filepath.Join(t.TempDir(), "stderr"))
	require.NoError(t, err)
	defer stderr.Close()
	const untilShownTwice = `until [ "$(grep -c "^ *[.][.][.] waiting: [1-9][0-9]* s$" "$0")" -ge 2 ]; do sleep 0.1; done; echo done; exit 7`
	cmd := exec.CommandContext(t.Context(), "../../hack/progress.sh", "waiting", "sh", "-c", untilShownTwice, stderr.Name())
	cmd.Env = append(cmd.Environ(), "PROGRESS_INTERVAL=1")
	var stdout bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, stderr
	err = cmd.Run()
	var exit *exec.ExitError
	require.True(t, errors.As(err, &exit), "%v", err)
	assert.Equal(t, 7, exit.ExitCode())
	assert.Equal(t, "done\n", stdout.String())
}
