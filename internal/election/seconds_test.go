package election

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestSecondsAreNumberOrString(t *testing.T) {
	for text, want := range map[string]Seconds{`15`: 15, `"17"`: 17, `null`: 0} {
		var s Seconds
		require.NoError(t, json.Unmarshal([]byte(text), &s), text)
		require.Equal(t, want, s, text)
	}
	for _, text := range []string{`""`, `"a"`, `1.5`, `{}`} {
		var s Seconds
		require.Error(t, json.Unmarshal([]byte(text), &s), text)
	}
}
