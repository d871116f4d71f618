package status

import (
	"testing"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/controllers"
	"github.com/ctrlmesh/ctrlmesh/manager/transfer"
)

// one returns a hand-written configuration that owns a namespace, and acts by a record.
func one(namespace, name, owns string, acting *v1alpha1.ActingLimits) *v1alpha1.ShardingConfig {
	return &v1alpha1.ShardingConfig{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, UID: types.UID(namespace + "/" + name), Generation: 1},
		Spec: v1alpha1.ShardingConfigSpec{Limits: []v1alpha1.ObjectLimiter{{
			Selector: &metav1.LabelSelector{MatchLabels: map[string]string{v1alpha1.NamespaceLabel: owns}},
		}}},
		Status: v1alpha1.ShardingConfigStatus{Acting: acting},
	}
}

func TestNewShardWaitsForPodsThatMayActOnItsObjects(t *testing.T) {
	none := &v1alpha1.ActingLimits{Hash: transfer.None}
	settled := one("ns", "settled", "a", nil)
	settled.Status.Acting = &v1alpha1.ActingLimits{Hash: transfer.Hash(settled.Spec.Limits)}
	for what, c := range map[string]struct {
		unconfirmed map[types.UID]string
		strays      map[string]string
		stale       bool // the policies do not follow from the newest record of the other one
		waits       string
	}{
		"nothing":                                  {},
		"a pod of its own":                         {unconfirmed: map[types.UID]string{"ns/new": "pod a"}, waits: "pod a"},
		"a pod of the other shard":                 {unconfirmed: map[types.UID]string{"ns/settled": "pod b"}, waits: "pod b"},
		"a pod without a configuration":            {strays: map[string]string{"ns": "pod c"}, waits: "pod c"},
		"a pod of which only the uid is known":     {strays: map[string]string{"": "pod d"}, waits: "pod d"},
		"the policies of the other shard":          {stale: true, waits: aboutTo},
		"no pod of another namespace":              {unconfirmed: map[types.UID]string{"other/new": "pod e"}, strays: map[string]string{"other": "pod f"}},
		"no pod of a configuration that is a root": {unconfirmed: map[types.UID]string{"ns/root": "pod g"}},
	} {
		t.Run(what, func(t *testing.T) {
			fresh, root := one("ns", "new", "b", nil), one("ns", "root", "", nil)
			root.Spec.Root = &v1alpha1.RootConfig{}
			configs := []*v1alpha1.ShardingConfig{fresh, settled, one("other", "new", "c", nil), root}
			compiled := &controllers.Compiled{Listed: &controllers.Listed{Configs: configs, Acting: transfer.Memory{}.Enact(configs)}}
			w := transfers{compiled, map[types.UID]bool{fresh.UID: true, settled.UID: !c.stale}, c.unconfirmed, c.strays}
			acting, waits := w.record(fresh)
			require.Equal(t, c.waits, waits)
			if want := none; c.waits == "" {
				want = &v1alpha1.ActingLimits{Hash: transfer.Hash(fresh.Spec.Limits)}
				require.Equal(t, want, acting)
			} else {
				require.Equal(t, want, acting)
			}
			acting, waits = w.record(settled)
			require.Equal(t, settled.Status.Acting, acting, "a settled one waits for nothing")
			require.Empty(t, waits)
			acting, _ = w.record(root)
			require.Nil(t, acting)
		})
	}
}

func TestRecordThatWasNotCompiledStays(t *testing.T) {
	c := one("ns", "new", "b", &v1alpha1.ActingLimits{Hash: "later"})
	compiled := one("ns", "new", "b", &v1alpha1.ActingLimits{Hash: transfer.None})
	configs := []*v1alpha1.ShardingConfig{compiled}
	w := transfers{&controllers.Compiled{Listed: &controllers.Listed{Configs: configs, Acting: transfer.Memory{}.Enact(configs)}}, nil, nil, nil}
	acting, waits := w.record(c)
	require.Equal(t, c.Status.Acting, acting)
	require.Equal(t, aboutTo, waits)
}

func TestShardsThatOwnNothingToTransfer(t *testing.T) {
	c := one("ns", "dry", "b", nil)
	c.Spec.DryRun = true
	acting, waits := transfers{Compiled: &controllers.Compiled{Listed: &controllers.Listed{}}}.record(c)
	require.Equal(t, &v1alpha1.ActingLimits{Hash: transfer.None}, acting, "if it ends, another one may own its objects")
	require.Empty(t, waits)
}
