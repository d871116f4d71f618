// Package needs ends tests that need what the machine lacks. A skipped test proves nothing, so
// in CI, where the environment variable CI is "true", it fails.
package needs

import (
	"fmt"
	"os"
	"os/exec"
	"testing"

	"golang.org/x/sys/unix"
)

// Root ends the test unless it runs as root.
func Root(t testing.TB, because string) {
	t.Helper()
	if os.Getuid() != 0 {
		end(t, "root: "+because)
	}
}

// Program returns the path of a program, and ends the test if it is not installed.
func Program(t testing.TB, name string) (path string) {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		end(t, name+": run tests/setup.sh test")
	}
	return path
}

// Path ends the test unless the path exists.
func Path(t testing.TB, path, because string) {
	t.Helper()
	if _, err := os.Stat(path); err != nil {
		end(t, because+": "+err.Error())
	}
}

// Kernel ends the test if the kernel is older than this version.
func Kernel(t testing.TB, major, minor int, because string) {
	t.Helper()
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		t.Fatalf("reading the version of the kernel: %v", err)
	}
	release := unix.ByteSliceToString(name.Release[:])
	have, err := isAtLeast(release, major, minor)
	if err != nil {
		t.Fatal(err)
	}
	if !have {
		end(t, fmt.Sprintf("Linux %d.%d, not %s: %s", major, minor, release, because))
	}
}

// isAtLeast reports whether a release of the kernel, such as "6.1.0-13-amd64", has a version.
func isAtLeast(release string, major, minor int) (bool, error) {
	var haveMajor, haveMinor int
	if _, err := fmt.Sscanf(release, "%d.%d", &haveMajor, &haveMinor); err != nil {
		return false, fmt.Errorf("parsing the version of the kernel %q: %w", release, err)
	}
	return haveMajor > major || haveMajor == major && haveMinor >= minor, nil
}

func end(t testing.TB, missing string) {
	t.Helper()
	if os.Getenv("CI") == "true" {
		t.Fatalf("CI must not skip this test, which needs %s", missing)
	} else {
		t.Skipf("needs %s", missing)
	}
}
