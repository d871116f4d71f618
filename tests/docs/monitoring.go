package docs

import (
	"encoding/json"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

// Panel is a panel of a dashboard.
type Panel struct {
	Title   string
	Targets []struct{ Expr string }
}

// Panels returns the panels of a dashboard for Grafana.
func Panels(t testing.TB, file string) []Panel {
	t.Helper()
	var board struct{ Panels []Panel }
	source, err := os.ReadFile(file)
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(source, &board))
	return board.Panels
}
