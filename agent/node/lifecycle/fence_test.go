package lifecycle

import (
	"testing"

	"github.com/stretchr/testify/assert"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

func TestFenceRejectsLowerSerials(t *testing.T) {
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
			var f Fence
			for _, p := range tt.had {
				f.Raise(p)
			}
			if err := f.Check(tt.policy); tt.err == "" {
				assert.NoError(t, err)
			} else {
				assert.ErrorContains(t, err, tt.err)
			}
		})
	}
}

func TestRestoredFenceRejectsTheSame(t *testing.T) {
	assert.Equal(t, Fence{7, 7}, RestoreFence(&meshv1.PodPolicy{Serial: 7}))
	f := RestoreFence(&meshv1.PodPolicy{Serial: 8, Refuse: "tested"})
	assert.Equal(t, Fence{7, 8}, f)
	assert.True(t, f.Barred())
	assert.Equal(t, Fence{}, RestoreFence(&meshv1.PodPolicy{Refuse: "tested"}))
}
