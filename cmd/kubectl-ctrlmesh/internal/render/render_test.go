package render

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

type sample struct {
	Name string `json:"name"`
}

func (s sample) WriteText(t *Text) {
	t.Line("of %s", s.Name)
	t.Table([]string{"A", "LONGER"}, [][]string{{"1", ""}, {"22", "x"}})
	t.Table([]string{"NONE"}, nil)
}

func TestFormats(t *testing.T) {
	for format, want := range map[string]string{
		"table": "of x\n\nA   LONGER\n1   -\n22  x\n",
		"json":  "{\n  \"name\": \"x\"\n}\n",
		"yaml":  "name: x\n",
	} {
		var b strings.Builder
		require.NoError(t, Check(format))
		require.NoError(t, Write(&b, format, sample{"x"}))
		require.Equal(t, want, b.String())
	}
	require.EqualError(t, Check("wide"), `unknown output format "wide": choose one of table, json, yaml`)
}

func TestSizes(t *testing.T) {
	require.Equal(t, "0 B, 2 KiB, 3 MiB, 5.0 GiB", strings.Join([]string{Size(0), Size(2048), Size(3 << 20), Size(5 << 30)}, ", "))
}
