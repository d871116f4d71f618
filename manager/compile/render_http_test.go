package compile

import (
	"testing"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

// Host and path are matched apart, so that rules are about the hosts that they name
// and no path passes for a host.
func TestExpressionsOfHostAndPath(t *testing.T) {
	for _, tt := range []struct{ content, host, path string }{
		{`.*\.evil\.com`, `.*\.evil\.com`, ``},
		{`(api|www)\.example\.com/admin/.*`, `(api|www)\.example\.com`, `/admin/.*`},
		{`api\.example\.com\/v1`, `api\.example\.com`, `/v1`},
		{`.*/b`, `.*`, `/b`},
		{`/metrics`, ``, `/metrics`},
	} {
		r := &renderer{}
		got := r.content(v1alpha1.ContentRegexp, tt.content, field.NewPath("contents"))
		require.Empty(t, r.errs, tt.content)
		require.Equal(t, tt.host, got.GetHost().GetRegexp(), tt.content)
		require.Equal(t, tt.path, got.GetPath().GetRegexp(), tt.content)
	}
	for _, content := range []string{`(a|b/c)`, `[^/]*/b`, `a/(`} {
		r := &renderer{}
		require.Nil(t, r.content(v1alpha1.ContentRegexp, content, field.NewPath("contents")), content)
		require.Len(t, r.errs, 1, content)
		require.Contains(t, r.errs[0].Error(), "by itself", content)
	}
}
