package capture

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/ctrlmesh/ctrlmesh/tests/reviews"
)

func TestReviewsThatProveTooLittleAreDoubted(t *testing.T) {
	for name, c := range map[string]struct {
		verdict        reviews.Verdict
		creates, kills int
		want           int
	}{
		"enough":              {reviews.Verdict{Checked: 50, Cut: 2 * maxCut}, 100, 2, 0},
		"no creates":          {reviews.Verdict{}, 0, 0, 1},
		"few were checked":    {reviews.Verdict{Checked: 49}, 100, 2, 1},
		"many were cut off":   {reviews.Verdict{Checked: 100, Cut: 2*maxCut + 1}, 200, 2, 1},
		"cut off by no agent": {reviews.Verdict{Checked: 100, Cut: 1}, 101, 0, 1},
	} {
		t.Run(name, func(t *testing.T) { require.Len(t, doubts(c.verdict, c.creates, c.kills), c.want) })
	}
}
