package sharding

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/failure"
	"github.com/ctrlmesh/ctrlmesh/tests/chaos/harness/operator"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

const (
	shadowSeed = 16
	shadowFor  = 4 * time.Minute
	shadowName = "next"
	// shadowWindow is longer than the shards need to work again after an agent was killed.
	shadowWindow = "1m"
)

// shadowDiffers are the fields in which a shadow differs: each pod of the operator records itself.
var shadowDiffers = []string{"status.generations", "status.reconciledBy", "status.reconciles"}

// shadow runs a shadow beside the shards of an operator while managers and agents are killed. First
// the fields in which it differs are ignored, and then they must be found.
func (s *suite) shadow(ctx context.Context) error {
	spec := operator.NewSpec(2, meshv1alpha1.OnChangeRelist)
	return s.run(ctx, "shadow", spec, func(ctx context.Context, o *shardedOperator) error {
		if err := o.startShadow(ctx); err != nil {
			return err
		}
		err := beside(ctx, shadowFor, o.readShadow, func(ctx context.Context) error {
			return disruptAll(ctx, shadowSeed, 20*time.Second, meshDisruptions(disruptAgentsEvery, killManagerEvery), []*shardedOperator{o})
		})
		if ctx.Err() == nil {
			err = errors.Join(err, o.findDifferences(ctx))
		}
		return errors.Join(err, o.judgeShadow())
	})
}

// startShadow starts a shadow of the operator, and waits until its writes are compared.
func (o *shardedOperator) startShadow(ctx context.Context) error {
	config := &meshv1alpha1.ShardingConfig{
		ObjectMeta: metav1.ObjectMeta{Namespace: o.Home, Name: shadowName},
		Spec: meshv1alpha1.ShardingConfigSpec{
			Selector:   &metav1.LabelSelector{MatchLabels: map[string]string{"app": shadowName}},
			Controller: &meshv1alpha1.ControllerConfig{LeaderElectionName: operator.Lock},
			Shadow:     &meshv1alpha1.Shadow{Window: shadowWindow, IgnoredFields: shadowDiffers},
		},
	}
	if err := o.CreateAll(ctx, config); err != nil {
		return err
	}
	err := o.CreateStatefulSet(ctx, 1, func(set *appsv1.StatefulSet) {
		set.Name = shadowName
		set.Spec.Selector.MatchLabels["app"], set.Spec.Template.Labels["app"] = shadowName, shadowName
	})
	if err != nil {
		return err
	}
	return o.untilShadow(ctx, "the shadow's writes to agree", func(s *meshv1alpha1.ShadowStatus) bool { return s.Agreed > 0 })
}

// shadowStatus returns what is reported of the shadow's writes.
func (o *shardedOperator) shadowStatus(ctx context.Context) (*meshv1alpha1.ShadowStatus, error) {
	config := &meshv1alpha1.ShardingConfig{}
	if err := o.Get(ctx, client.ObjectKey{Namespace: o.Home, Name: shadowName}, config); err != nil {
		return nil, fmt.Errorf("reading the shadow's configuration: %w", err)
	}
	if config.Status.Shadow == nil {
		return &meshv1alpha1.ShadowStatus{}, nil
	}
	return config.Status.Shadow, nil
}

func (o *shardedOperator) untilShadow(ctx context.Context, what string, is func(*meshv1alpha1.ShadowStatus) bool) error {
	return kube.UntilWithin(ctx, operator.SettleTimeout, what, func(ctx context.Context) error {
		s, err := o.shadowStatus(ctx)
		if err == nil && !is(s) {
			err = fmt.Errorf("%+v", s)
		}
		return err
	})
}

// readShadow counts the writes of the shadow until ctx ends. An agent counts anew when it starts.
func (o *shardedOperator) readShadow(ctx context.Context) error {
	last := &meshv1alpha1.ShadowStatus{}
	for kube.Sleep(ctx, time.Second) == nil {
		now, err := o.shadowStatus(ctx)
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil:
			return err
		case now.Agreed < last.Agreed:
			last = &meshv1alpha1.ShadowStatus{}
		}
		if now.Differed > last.Differed {
			o.Logf("  ! the shadow differs: %+v", now.Differences)
		}
		o.counts.shadowAgreed += int(now.Agreed - last.Agreed)
		o.counts.shadowFalse += int(max(0, now.Differed-last.Differed) + max(0, now.Refused-last.Refused))
		last = now
	}
	return nil
}

// findDifferences waits until the fields in which the shadow differs are reported, and no others.
func (o *shardedOperator) findDifferences(ctx context.Context) error {
	config := &meshv1alpha1.ShardingConfig{}
	err := o.Until(ctx, "the shadow's configuration to be changed", func(ctx context.Context) error {
		if err := o.Get(ctx, client.ObjectKey{Namespace: o.Home, Name: shadowName}, config); err != nil {
			return err
		}
		config.Spec.Shadow.IgnoredFields = nil
		return o.Update(ctx, config)
	})
	if err != nil {
		return err
	}
	pod := shadowName + "-0"
	want := []string{shadowDiffers[0] + "." + pod, shadowDiffers[1] + "[]", shadowDiffers[2] + "." + pod}
	err = o.untilShadow(ctx, "the differences to be found", func(s *meshv1alpha1.ShadowStatus) bool {
		return len(s.Differences) == 1 && slices.Equal(s.Differences[0].Fields, want)
	})
	if err == nil {
		o.counts.shadowFound++
	}
	return err
}

// judgeShadow counts the writes of the shadow that took effect.
func (o *shardedOperator) judgeShadow() error {
	_, writes, err := o.Evidence()
	for _, w := range writes {
		if w.Pod == o.Home+"/"+shadowName+"-0" {
			o.counts.shadowPersisted++
			o.Logf("  ! %s", w)
		}
	}
	return failure.Wrap(err, "reading the writes of the shadow")
}
