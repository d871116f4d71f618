package repo

import (
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// subject is the form of a commit's first line: `area: verb object`. Git writes those of
// merges and reverts.
var subject = regexp.MustCompile(`^([^:]{1,40}: [a-zA-Z0-9]|Merge |Revert ")`)

func TestCommitSubjects(t *testing.T) {
	out, err := exec.CommandContext(t.Context(), "git", "log", "--since=2026-11-23T13:00:00Z", "--format=%s").Output()
	require.NoError(t, err)
	for line := range strings.Lines(string(out)) {
		line = strings.TrimSuffix(line, "\n")
		assert.LessOrEqual(t, len(line), 72, "characters: shorten the subject %q, and say the rest in the body", line)
		assert.Regexp(t, subject, line, "write the subject as `area: verb object`")
	}
}
