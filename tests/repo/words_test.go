package repo

import (
	"go/scanner"
	"go/token"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"unicode"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// private are words that the project once used in a sense of its own, with the
// field's words for them.
var private = map[string]string{
	"tell": "push, send, notify or report", "tells": "pushes, sends, notifies or reports", "told": "pushed, sent, notified or reported", "telling": "pushing, sending or reporting",
	"mend": "repair", "mends": "repairs", "mended": "repaired", "mending": "repairing",
	"harm": "inject a fault into", "harms": "injects a fault into", "harmed": "with a fault", "harming": "injecting faults into",
	"spare": "skip", "spares": "skips", "spared": "skipped",
	"condemn": "deny", "condemns": "denies", "condemned": "denied",
	"alike": "equal, equally", "whoever": "a subject with a name", "born": "created", "obituary": "report of the exit",
}

// persisted are private words that stand on disk or in messages between two versions of the
// agent, by file.
var persisted = map[string]string{"agent/takeover/podstart.go": "born", "agent/takeover/wire.go": "born"}

var word = regexp.MustCompile(`[A-Za-z]+`)

// TestNoPrivateWords holds identifiers, comments, texts and documents to the words of
// the field.
func TestNoPrivateWords(t *testing.T) {
	for file, text := range sources(t) {
		if filepath.Ext(file) != ".go" {
			for i, line := range strings.Split(text, "\n") {
				assertPlain(t, file, i+1, line)
			}
			continue
		}
		files := token.NewFileSet()
		var s scanner.Scanner
		s.Init(files.AddFile(file, -1, len(text)), []byte(text), nil, scanner.ScanComments)
		for {
			pos, tok, lit := s.Scan()
			if tok == token.EOF {
				break
			}
			assertPlain(t, file, files.Position(pos).Line, lit)
		}
	}
}

func assertPlain(t *testing.T, file string, line int, text string) {
	t.Helper()
	for _, w := range word.FindAllString(text, -1) {
		for _, part := range camelWords(w) {
			if use, found := private[strings.ToLower(part)]; found && persisted[file] != part {
				assert.Fail(t, "a private word", "%s:%d: instead of %q write %s", file, line, w, use)
			}
		}
	}
}

// camelWords splits an identifier before each capital that follows a small letter.
func camelWords(name string) (words []string) {
	start := 0
	for i := 1; i < len(name); i++ {
		if unicode.IsUpper(rune(name[i])) && unicode.IsLower(rune(name[i-1])) {
			words, start = append(words, name[start:i]), i
		}
	}
	return append(words, name[start:])
}

// sources returns the texts of the project that people write, by file.
func sources(t *testing.T) map[string]string {
	t.Helper()
	git := exec.Command("git", "ls-files", "*.go", "*.md", "*.proto", "*.c", "*.h", "*.yaml", "*.sh", "Makefile")
	git.Dir = "../.."
	out, err := git.Output()
	require.NoError(t, err)
	all := map[string]string{}
	for file := range strings.FieldsSeq(string(out)) {
		text, err := os.ReadFile(filepath.Join("../..", file))
		require.NoError(t, err)
		if file == "tests/repo/words_test.go" || strings.Contains(string(text[:min(len(text), 400)]), "DO NOT EDIT") {
			continue
		}
		all[file] = string(text)
	}
	require.Greater(t, len(all), 500)
	return all
}
