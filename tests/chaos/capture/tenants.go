package capture

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/tests/chaos/capture/fleet"
	"github.com/ctrlmesh/ctrlmesh/tests/chaos/harness"
	"github.com/ctrlmesh/ctrlmesh/tests/reviews"
	"github.com/ctrlmesh/ctrlmesh/tests/stats"
)

const (
	costlyConfigs  = 32
	costlyPatterns = 4 // in each, together as large as admission lets them be
	tenantReviews  = 40
	latencyShare   = 0.99
)

// costlyPattern compiles to almost as many instructions as one pattern may, and matches nothing.
const costlyPattern = "(?:.?){590}_"

// memberExhaustions are attacks on the port at which a member answers reviews.
var memberExhaustions = []string{"idle", "stalled", "heads", "bodies", "reviews", "streams"}

// attackAsTenant makes the attacks of somebody who may write what the users of a namespace may,
// and checks that others are served meanwhile.
func (s *suite) attackAsTenant(ctx context.Context, victim *fleet.Member, outsider string) error {
	home, err := s.CreatePodNamespace(ctx, "tenant")
	if err != nil {
		return err
	}
	tenant := func(name string, do func() (string, error)) {
		before := s.counts.repelled
		s.attack(name, do)
		s.counts.tenants++
		s.counts.tenantsRepelled += s.counts.repelled - before
	}
	tenant("costly patterns", func() (string, error) {
		return s.withServices(ctx, victim, func(ctx context.Context) (string, error) { return s.costlyPatterns(ctx, home) })
	})
	tenant("a used-up quota", func() (string, error) { return s.usedUpQuota(ctx) })
	return s.attackReviews(ctx, outsider, tenant)
}

// costlyPatterns writes the configurations that cost the manager most, and has another namespace's
// configurations take effect meanwhile.
func (s *suite) costlyPatterns(ctx context.Context, home string) (why string, err error) {
	defer func() {
		err = errors.Join(err, s.DeleteAllOf(context.WithoutCancel(ctx), &meshv1alpha1.ShardingConfig{}, client.InNamespace(home)))
	}()
	for i := range costlyConfigs {
		if err := s.Create(ctx, costlyConfig(home, i)); err != nil {
			return "", fmt.Errorf("writing a costly configuration: %w", err)
		}
	}
	other, err := s.CreateNamespace(ctx, "neighbour")
	if err != nil {
		return "", err
	}
	const changes = 20
	var took []time.Duration
	for i := range changes {
		d, err := s.takesEffect(ctx, other, i)
		if err != nil {
			return "", err
		}
		took = append(took, d)
	}
	p99 := stats.Percentile(took, latencyShare)
	if p99 > maxLatency {
		return "", fmt.Errorf("another's configuration took %v to be seen", p99)
	}
	return fmt.Sprintf("%d configurations; another's took %v to be seen", costlyConfigs, p99.Round(time.Millisecond)), nil
}

func costlyConfig(home string, i int) *meshv1alpha1.ShardingConfig {
	limit := meshv1alpha1.ObjectLimiter{RelateResources: []meshv1alpha1.ResourceGroup{{APIGroups: []string{""}, Resources: []string{"configmaps"}}}}
	for p := range costlyPatterns {
		limit.Namespaces = append(limit.Namespaces, meshv1alpha1.NamespaceMatch{Pattern: costlyPattern + strconv.Itoa(costlyPatterns*i+p)})
	}
	name := fmt.Sprintf("costly-%d", i)
	return &meshv1alpha1.ShardingConfig{
		ObjectMeta: metav1.ObjectMeta{Namespace: home, Name: name},
		Spec: meshv1alpha1.ShardingConfigSpec{Root: &meshv1alpha1.RootConfig{
			Prefix: name, TargetRef: &meshv1alpha1.TargetRef{Kind: "Deployment", Name: name},
			Auto: &meshv1alpha1.AutoConfig{ShardingSize: 2, EveryShardReplicas: 1}, ResourceSelector: []meshv1alpha1.ObjectLimiter{limit},
		}},
	}
}

// plainConfig returns a configuration without pods, whose objects are in its own namespace.
func plainConfig(home, name string) *meshv1alpha1.ShardingConfig {
	return &meshv1alpha1.ShardingConfig{
		ObjectMeta: metav1.ObjectMeta{Namespace: home, Name: name},
		Spec: meshv1alpha1.ShardingConfigSpec{
			Selector: &metav1.LabelSelector{MatchLabels: map[string]string{harness.PolicyLabel: home}},
			Limits: []meshv1alpha1.ObjectLimiter{{
				RelateResources: []meshv1alpha1.ResourceGroup{{APIGroups: []string{""}, Resources: []string{"configmaps"}}},
				Selector:        &metav1.LabelSelector{MatchLabels: map[string]string{meshv1alpha1.NamespaceLabel: home}},
			}},
		},
	}
}

// takesEffect returns how long the manager takes to see a configuration.
func (s *suite) takesEffect(ctx context.Context, home string, i int) (time.Duration, error) {
	c := plainConfig(home, fmt.Sprintf("neighbour-%d", i))
	start := time.Now()
	if err := s.Create(ctx, c); err != nil {
		return 0, err
	}
	err := s.UntilObject(ctx, "the manager to see "+c.Name, c, func() error {
		if c.Status.ObservedGeneration < c.Generation {
			return errors.New("it has not seen it")
		}
		return nil
	})
	took := time.Since(start)
	return took, errors.Join(err, s.Delete(ctx, c))
}

// usedUpQuota leaves no room for the mesh's bundle in a namespace. The tenant's own configuration
// says so, and the pods of others start.
func (s *suite) usedUpQuota(ctx context.Context) (string, error) {
	home, err := s.CreateNamespace(ctx, "quota") // without the bundle yet
	if err != nil {
		return "", err
	}
	quota := &corev1.ResourceQuota{
		ObjectMeta: metav1.ObjectMeta{Namespace: home, Name: "no-configmaps"},
		Spec:       corev1.ResourceQuotaSpec{Hard: corev1.ResourceList{corev1.ResourceConfigMaps: resource.MustParse("1")}},
	}
	if err := s.CreateAll(ctx, quota); err != nil {
		return "", err
	}
	err = s.UntilObject(ctx, "the quota to count", quota, func() error {
		if used := quota.Status.Used[corev1.ResourceConfigMaps]; used.IsZero() {
			return errors.New("it has counted nothing")
		}
		return nil
	})
	if err != nil {
		return "", err
	}
	c := plainConfig(home, "own")
	if err := s.CreateAll(ctx, c); err != nil {
		return "", err
	}
	err = s.UntilObject(ctx, "the status to blame the quota", c, func() error {
		cond := meta.FindStatusCondition(c.Status.Conditions, meshv1alpha1.ConditionDegraded)
		if cond == nil || cond.Reason != string(meshv1alpha1.ReasonBundleRefused) || !strings.Contains(cond.Message, "quota") {
			return fmt.Errorf("it says %+v", cond)
		}
		return nil
	})
	if err != nil {
		return "", err
	}
	other, err := s.CreatePodNamespace(ctx, "neighbour")
	if err != nil {
		return "", err
	}
	start := time.Now()
	if err := s.CreateReady(ctx, harness.NewPod(other, "neighbour", "", "ebpf", s.Nodes[0], "sleep", "1000000")); err != nil {
		return "", err
	}
	return fmt.Sprintf("another's pod started in %v", time.Since(start).Round(time.Millisecond)), nil
}

// attackReviews attacks the ports at which the members of an operator with webhooks answer, while
// the apiserver sends them reviews.
func (s *suite) attackReviews(ctx context.Context, outsider string, tenant func(string, func() (string, error))) error {
	return s.reviewed(ctx, func(r *reviewing) error {
		var targets []string
		err := r.site.EachPod(ctx, func(pod *corev1.Pod, _ string) error {
			targets = append(targets, "https://"+net.JoinHostPort(pod.Status.PodIP, strconv.Itoa(reviews.Port))+"/mutate")
			return nil
		})
		if err != nil {
			return err
		}
		for _, kind := range memberExhaustions {
			tenant("a member's webhooks by "+kind, func() (string, error) {
				return r.undisturbed(ctx, func() (string, error) {
					return s.intrude(ctx, outsider, append([]string{"exhaust", kind}, targets...)...)
				})
			})
		}
		return nil
	})
}

// undisturbed attacks, and checks that the reviews which the apiserver sends meanwhile are answered
// in time, by the owner of the object's namespace.
func (r *reviewing) undisturbed(ctx context.Context, attack func() (string, error)) (string, error) {
	load := r.site.Load(ctx, tenantReviews/reviews.PerCreate, r.tenants...)
	why, err := attack()
	outcomes := load.Stop()
	if err != nil {
		return "", err
	}
	v := r.judge.Check(outcomes)
	var took []time.Duration
	for _, o := range outcomes {
		took = append(took, o.End.Sub(o.Start))
	}
	p99 := stats.Percentile(took, latencyShare)
	switch {
	case v.Failed+v.Misrouted > 0:
		return "", fmt.Errorf("%d of %d creates failed, %d were misrouted: %v", v.Failed, len(outcomes), v.Misrouted, v.Findings)
	case v.Checked == 0:
		return "", errors.New("nothing was reviewed")
	case p99 > maxLatency:
		return "", fmt.Errorf("creates took %v", p99)
	}
	return fmt.Sprintf("%s; %d creates took %v at most but for 1%%", why, v.Checked, p99.Round(time.Millisecond)), r.routed(ctx)
}
