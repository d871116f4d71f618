package e2e

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

// An operator's Role names its ConfigMap lock. The mesh permits shards to use Leases alone, so
// it says within a minute what is missing.
func TestRefusedConfigMapLockReachesTheStatus(t *testing.T) {
	t.Parallel()
	ns := namespace(t, "refused")
	const lock = "op"
	rights := func(name string, rules ...rbacv1.PolicyRule) {
		object := metav1.ObjectMeta{Namespace: ns, Name: name}
		create(t, &rbacv1.Role{ObjectMeta: object, Rules: rules}, &rbacv1.RoleBinding{
			ObjectMeta: object, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: name},
			Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: ns, Name: probeAccount}},
		})
	}
	onConfigMaps := func(names []string, verbs ...string) rbacv1.PolicyRule {
		return rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"configmaps"}, ResourceNames: names, Verbs: verbs}
	}
	create(t, &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: probeAccount}})
	rights("op", onConfigMaps(nil, "create"), onConfigMaps([]string{lock}, "get", "update", "patch"))
	c := shard(ns, "s", []string{"member"}, []string{owned(t)}, "configmaps")
	c.Spec.Controller = &meshv1alpha1.ControllerConfig{LeaderElectionName: lock}
	create(t, c, netPod(ns, "member", nodes(t)[0]))
	pod := ready(t, ns, "member")
	settled(t, ns, "s", 1)
	member := clientOf(t, from(t, pod), inJSON)

	start := time.Now()
	missing := func(ctx context.Context) (*metav1.Condition, error) {
		err := cluster.Get(ctx, client.ObjectKeyFromObject(c), c)
		is := meta.FindStatusCondition(c.Status.Conditions, meshv1alpha1.ConditionLeaderMissing)
		return is, errors.Join(err, orElse(is != nil, "it has no condition"))
	}
	until(t, "the refusal in the status", func(ctx context.Context) error {
		err := member.Get(ctx, client.ObjectKey{Namespace: ns, Name: lock}, &corev1.ConfigMap{})
		if !apierrors.IsForbidden(err) {
			return fmt.Errorf("reading the lock: %w", err)
		}
		is, err := missing(ctx)
		if err != nil {
			return err
		}
		named := strings.Contains(is.Message, fmt.Sprintf(`the apiserver answers 403 to pod member for "get configmaps %s/op---s"`, ns)) &&
			strings.Contains(is.Message, "--resource=configmaps --resource-name=op---s")
		return orElse(named, fmt.Sprintf("%s %s: %s", is.Status, is.Reason, is.Message))
	})
	require.Less(t, time.Since(start), time.Minute)

	rights("shard", onConfigMaps([]string{"op---s"}, "get", "update", "patch"))
	held := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: lock, Annotations: map[string]string{
		"control-plane.alpha.kubernetes.io/leader": `{"holderIdentity":"member_1","leaseDurationSeconds":3600}`,
	}}}
	until(t, "the lock", func(ctx context.Context) error {
		held.ResourceVersion = ""
		if err := member.Create(ctx, held); err != nil && !apierrors.IsAlreadyExists(err) {
			return err
		}
		held.ResourceVersion = ""
		return member.Update(ctx, held) // the new Role may not be known at once
	})
	until(t, "the leader", func(ctx context.Context) error {
		is, err := missing(ctx)
		if err != nil {
			return err
		}
		return orElse(is.Status == metav1.ConditionFalse, is.Message)
	})
}
