package needs

import (
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// ended is a test that notes how it ended.
type ended struct {
	testing.TB
	how string
}

func (*ended) Helper()                 {}
func (e *ended) Skipf(string, ...any)  { e.how = "skipped" }
func (e *ended) Fatalf(string, ...any) { e.how = "failed" }

func TestMissingNeedsSkipAndFailInCI(t *testing.T) {
	absent := filepath.Join(t.TempDir(), "absent")
	for ci, want := range map[string]string{"": "skipped", "false": "skipped", "true": "failed"} {
		t.Setenv("CI", ci)
		for what, need := range map[string]func(testing.TB){
			"program": func(t testing.TB) { Program(t, absent) },
			"path":    func(t testing.TB) { Path(t, absent, "a file") },
			"kernel":  func(t testing.TB) { Kernel(t, 999, 0, "features of the future") },
		} {
			e := &ended{TB: t}
			need(e)
			require.Equal(t, want, e.how, "%s with CI=%q", what, ci)
		}
	}
}

func TestNeedsAreFound(t *testing.T) {
	t.Setenv("CI", "true")
	shell, err := exec.LookPath("sh")
	require.NoError(t, err)
	e := &ended{TB: t}
	require.Equal(t, shell, Program(e, "sh"))
	Path(e, shell, "a shell")
	Kernel(e, 2, 6, "processes")
	require.Empty(t, e.how)
}

func TestReleasesAreCompared(t *testing.T) {
	for release, want := range map[string]bool{
		"5.14.0": true, "5.14": true, "5.15.1-x": true, "6.1.0-13-amd64": true, "10.0+": true,
		"5.13.99": false, "5.4.0": false, "4.19": false,
	} {
		have, err := isAtLeast(release, 5, 14)
		require.NoError(t, err)
		require.Equal(t, want, have, release)
	}
	_, err := isAtLeast("rolling", 5, 14)
	require.ErrorContains(t, err, "rolling")
}
