package lifecycle

import (
	"testing"

	"github.com/stretchr/testify/assert"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

func TestLowerSerialsAreRejected(t *testing.T) {
	serial := func(n uint64) *meshv1.PodPolicy { return &meshv1.PodPolicy{Serial: n} }
	refusal := func(n uint64) *meshv1.PodPolicy { return &meshv1.PodPolicy{Serial: n, Refuse: "tested"} }
	required := func(n uint64) *meshv1.PodPolicy { return &meshv1.PodPolicy{Serial: n + 1, RequiredSerial: n} }
	for _, tt := range []struct {
		name   string
		had    []*meshv1.PodPolicy
		policy *meshv1.PodPolicy
		err    string
	}{
		{"new pod", nil, serial(7), ""},
		{"the same serial again", []*meshv1.PodPolicy{serial(7)}, serial(7), ""},
		{"a lower serial", []*meshv1.PodPolicy{serial(7)}, serial(6), "may act on 7 or later"},
		{"no serial after one", []*meshv1.PodPolicy{serial(7)}, serial(0), "delete the pod"},
		{"no serial ever", []*meshv1.PodPolicy{serial(0)}, serial(0), ""},
		{"the same serial after a refusal", []*meshv1.PodPolicy{serial(7), refusal(0)}, serial(7), "may act on 8 or later"},
		{"a refusal is always accepted", []*meshv1.PodPolicy{serial(7)}, refusal(3), ""},
		{"a required serial", []*meshv1.PodPolicy{serial(7)}, required(7), ""},
		{"a required serial that the pod has not had", []*meshv1.PodPolicy{serial(6)}, required(7), "which this agent does not know"},
		{"a required serial after a refusal", []*meshv1.PodPolicy{serial(7), refusal(7)}, required(7), "which this agent does not know"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var s Serials
			for _, p := range tt.had {
				s.Raise(p)
			}
			if err := s.Check(tt.policy); tt.err == "" {
				assert.NoError(t, err)
			} else {
				assert.ErrorContains(t, err, tt.err)
			}
		})
	}
}

func TestRestoredSerialsRejectTheSame(t *testing.T) {
	assert.Equal(t, Serials{7, 7}, RestoreSerials(&meshv1.PodPolicy{Serial: 7}))
	s := RestoreSerials(&meshv1.PodPolicy{Serial: 8, Refuse: "tested"})
	assert.Equal(t, Serials{7, 8}, s)
	assert.True(t, s.Barred())
	assert.Equal(t, Serials{}, RestoreSerials(&meshv1.PodPolicy{Refuse: "tested"}))
}
