package bpf

import (
	"errors"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/stretchr/testify/require"

	"github.com/ctrlmesh/ctrlmesh/internal/needs"
)

// TestOldKernelLacksOptionalFeatures replaces the helpers that an old kernel lacks by helpers that no kernel has.
func TestOldKernelLacksOptionalFeatures(t *testing.T) {
	needs.Root(t, "loads BPF programs")
	for _, test := range []struct {
		lack    lack
		helpers []asm.BuiltinFunc
	}{
		{lackOfLookUp, []asm.BuiltinFunc{asm.FnSkLookupTcp, asm.FnSkRelease}},
		{lackOfCgroups, []asm.BuiltinFunc{asm.FnGetCurrentCgroupId, asm.FnGetCurrentAncestorCgroupId}},
	} {
		t.Run(string(test.lack), func(t *testing.T) {
			load := func(r *Redirect) error {
				spec, err := loadRedirect()
				require.NoError(t, err)
				replaced := 0
				for _, name := range []string{redirectProgConnect4, redirectProgConnect6} {
					for i, instruction := range spec.Programs[name].Instructions {
						for _, helper := range test.helpers {
							if instruction.IsBuiltinCall() && instruction.Constant == int64(helper) {
								spec.Programs[name].Instructions[i].Constant = 1 << 20
								replaced++
							}
						}
					}
				}
				require.NotZero(t, replaced)
				for _, m := range spec.Maps {
					m.Pinning = ebpf.PinNone
				}
				require.NoError(t, r.adjust(spec))
				var programs struct {
					Connect4 *ebpf.Program `ebpf:"connect4"`
					Connect6 *ebpf.Program `ebpf:"connect6"`
				}
				err = spec.LoadAndAssign(&programs, nil)
				return errors.Join(err, programs.Connect4.Close(), programs.Connect6.Close())
			}
			require.Error(t, load(&Redirect{lacks: map[lack]error{}}), "nothing is known to lack")
			r := &Redirect{lacks: map[lack]error{test.lack: errors.New("an old kernel")}}
			require.NoError(t, load(r))
			require.Len(t, r.Lacks(), 1)
			require.ErrorContains(t, r.Lacks()[0], "an old kernel")
			if test.lack == lackOfCgroups {
				require.ErrorIs(t, r.HostNetwork(), ErrUnsupported)
				require.ErrorIs(t, r.SetPod(ByCgroup(1), Pod{}), ErrUnsupported)
			}
		})
	}
}
