package sharding

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/tests/chaos/harness/operator"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

const subsetsSeed = 11

// versions are the subsets; the default subset has all other tenants.
var versions = []string{"v2", "v3"}

var subsetDisruptions = []disruptions{
	{"an operator killed", 4, killPod},
	{"an operator's pod deleted", 3, deletePod},
	{"an agent killed", 4, killAgent},
	{"the manager killed", 3, killManager},
}

// subsets relabels tenants from one subset to another while pods, agents and the manager are
// killed.
func (s *suite) subsets(ctx context.Context) error {
	spec := operator.NewSubsets(meshv1alpha1.OnChangeRelist, versions...)
	return s.run(ctx, "subsets", spec, func(ctx context.Context, o *shardedOperator) error {
		broken := make(chan error, 1)
		breaking, stop := context.WithCancel(ctx)
		go func() { broken <- o.disrupt(breaking, subsetDisruptions) }()
		err := o.relabelWhile(ctx, broken)
		stop() // after an error disruptions may be under way
		return errors.Join(err, o.WaitSettled(ctx))
	})
}

// relabelWhile relabels one tenant after another until the disruptions have ended, and at least
// minRelabelled times. Each tenant must be handed over.
func (o *shardedOperator) relabelWhile(ctx context.Context, broken <-chan error) error {
	random := rand.New(rand.NewPCG(subsetsSeed, 0))
	all := append(slices.Clone(versions), "")
	for ended := false; !ended || o.counts.relabelled < minRelabelled; {
		select {
		case err := <-broken:
			if err != nil {
				return err
			}
			ended = true
		default:
		}
		tenant, version := o.Tenants.Names[random.IntN(len(o.Tenants.Names))], all[random.IntN(len(all))]
		moves, err := o.relabel(ctx, tenant, version)
		if err != nil {
			return fmt.Errorf("relabelling %s to %q: %w", tenant, version, err)
		}
		if moves {
			o.counts.relabelled++
		}
	}
	return nil
}

// relabel gives a tenant the label of a version, or none if it is empty, and waits until the
// version's shard owns it. It reports whether another shard owned it before.
func (o *shardedOperator) relabel(ctx context.Context, tenant, version string) (moves bool, err error) {
	value, shard := "null", operator.Name+"-"+meshv1alpha1.DefaultSubset
	if version != "" {
		value, shard = fmt.Sprintf("%q", version), operator.Name+"-"+version
	}
	patch := fmt.Appendf(nil, `{"metadata":{"labels":{%q:%s}}}`, operator.VersionLabel, value)
	if err := o.Until(ctx, "the tenant to be labelled", func(ctx context.Context) error {
		return o.Patch(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: tenant}}, client.RawPatch(types.MergePatchType, patch))
	}); err != nil {
		return false, err
	}
	err = kube.UntilWithin(ctx, operator.SettleTimeout, "the tenant to be handed over", func(ctx context.Context) error {
		root, err := o.ShardingConfig(ctx)
		if err != nil {
			return err
		}
		tenants, err := o.TenantsByShard(root.Status.Root)
		if err != nil {
			return err
		}
		if !slices.Contains(tenants[shard], tenant) {
			moves = true
			return fmt.Errorf("%s does not own it: %s", shard, root.Status.Root.Handover)
		}
		return nil
	})
	return moves, err
}
