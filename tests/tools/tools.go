// Package tools finds the programs that tests run and that are built from modules of their own.
package tools

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// Program returns the path of a program of hack/MODULE, which is built first. root is the root directory
// of the repository.
func Program(ctx context.Context, root, module, name string) (string, error) {
	cmd := exec.CommandContext(ctx, filepath.Join(root, "hack", "tools.sh"), module)
	cmd.Stderr = os.Stderr // the progress
	dir, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("building %s: %w", module, err)
	}
	return filepath.Join(strings.TrimSpace(string(dir)), name), nil
}
