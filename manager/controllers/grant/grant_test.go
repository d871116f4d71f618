package grant

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/controllers"
	"github.com/ctrlmesh/ctrlmesh/manager/platform"
)

// world is a cluster whose RBAC names the operator's lock, as cert-manager's does: its Role
// allows account op/sa to update kube-system/lock.
type world struct {
	*Controller
	client.Client
	config *v1alpha1.ShardingConfig
	// refuses is the error of writes of Roles; nil if there is none.
	refuses error
	// asked counts questions about permissions.
	asked int
	// leads reports whether the account may update the operator's own lock.
	leads bool
}

func newWorld(t *testing.T) *world {
	t.Helper()
	scheme := runtime.NewScheme()
	require.NoError(t, errors.Join(clientgoscheme.AddToScheme(scheme), v1alpha1.AddToScheme(scheme)))
	w := &world{leads: true, config: &v1alpha1.ShardingConfig{ObjectMeta: metav1.ObjectMeta{Namespace: "op", Name: "root", UID: "root"}, Spec: v1alpha1.ShardingConfigSpec{Root: &v1alpha1.RootConfig{}}}}
	w.Client = fake.NewClientBuilder().WithScheme(scheme).WithInterceptorFuncs(interceptor.Funcs{
		Create: func(ctx context.Context, c client.WithWatch, o client.Object, opts ...client.CreateOption) error {
			if _, ok := o.(*rbacv1.Role); ok && w.refuses != nil {
				return w.refuses
			}
			return c.Create(ctx, o, opts...)
		},
	}).Build()
	w.Controller = &Controller{Client: w.Client, May: w.may, State: &controllers.State{}, Log: slog.New(slog.NewTextHandler(t.Output(), nil))}
	w.State.Settings.Store(platform.Default())
	w.shards(1, 2)
	return w
}

// may evaluates the Role of the operator, and those of the mesh.
func (w *world) may(ctx context.Context, account, lock types.NamespacedName) (bool, error) {
	w.asked++
	if lock.Name == "lock" {
		return w.leads, nil
	}
	var roles rbacv1.RoleList
	if err := w.List(ctx, &roles, client.InNamespace(lock.Namespace)); err != nil {
		return false, err
	}
	for _, role := range roles.Items {
		binding := &rbacv1.RoleBinding{}
		if err := w.Get(ctx, client.ObjectKeyFromObject(&role), binding); err != nil {
			return false, client.IgnoreNotFound(err)
		}
		bound := slices.Contains(binding.Subjects, rbacv1.Subject{Kind: "ServiceAccount", Namespace: account.Namespace, Name: account.Name})
		if bound && slices.Contains(role.Rules[0].ResourceNames, lock.Name) {
			return true, nil
		}
	}
	return false, nil
}

// shards makes the policies those of shards with one member each.
func (w *world) shards(numbers ...int) {
	c := &controllers.Compiled{Listed: &controllers.Listed{Configs: []*v1alpha1.ShardingConfig{w.config}}}
	for _, n := range numbers {
		name := "op-" + string(rune('0'+n)) + "-normal"
		c.Shards = append(c.Shards, compile.Shard{
			NamespacedName: types.NamespacedName{Namespace: "op", Name: name}, Root: w.config,
			Locks:   []*meshv1.Lock{{Namespace: "kube-system", Name: "lock", UpstreamName: "lock---" + name}},
			Members: []*corev1.Pod{{ObjectMeta: metav1.ObjectMeta{Namespace: "op", Name: "op-0"}, Spec: corev1.PodSpec{ServiceAccountName: "sa"}}},
		})
	}
	w.State.Compiled.Store(c)
}

func (w *world) roles(t *testing.T) []rbacv1.Role {
	t.Helper()
	var roles rbacv1.RoleList
	require.NoError(t, w.List(t.Context(), &roles))
	return roles.Items
}

func (w *world) forbidden() string { return (*w.State.ForbiddenLocks.Load())["root"] }

func TestAccountThatLeadsMayUseTheLocksOfItsShards(t *testing.T) {
	w := newWorld(t)
	require.NoError(t, w.Reconcile(t.Context()))
	for _, name := range []string{"lock---op-1-normal", "lock---op-2-normal"} {
		lock := types.NamespacedName{Namespace: "kube-system", Name: name}
		may, err := w.may(t.Context(), types.NamespacedName{Namespace: "op", Name: "sa"}, lock)
		require.NoError(t, err)
		require.True(t, may, name)
		require.NoError(t, w.Get(t.Context(), lock, &coordinationv1.Lease{}), "a Role cannot permit its creation by name")
	}
	may, err := w.may(t.Context(), types.NamespacedName{Namespace: "op", Name: "default"}, types.NamespacedName{Namespace: "kube-system", Name: "lock---op-1-normal"})
	require.NoError(t, err)
	require.False(t, may)
	require.Empty(t, w.forbidden())

	w.shards(1, 2, 3)
	require.NoError(t, w.Reconcile(t.Context()))
	roles := w.roles(t)
	require.Len(t, roles, 1)
	require.Equal(t, "ctrlmesh-lock-op.root", roles[0].Name)
	require.Equal(t, []rbacv1.PolicyRule{{
		APIGroups: []string{"coordination.k8s.io"}, Resources: []string{"leases"}, Verbs: []string{"get", "update", "patch"},
		ResourceNames: []string{"lock---op-1-normal", "lock---op-2-normal", "lock---op-3-normal"},
	}}, roles[0].Rules)

	asked := w.asked
	require.NoError(t, w.Reconcile(t.Context()))
	require.Equal(t, asked, w.asked, "an answer is believed for a while")
}

// Who may not lead is not permitted to.
func TestAccountThatMayNotLeadIsGrantedNothing(t *testing.T) {
	w := newWorld(t)
	w.leads = false
	require.NoError(t, w.Reconcile(t.Context()))
	require.Empty(t, w.roles(t))
	require.Empty(t, w.forbidden())
}

func TestForbiddenLocksAreReportedWithTheCommand(t *testing.T) {
	const command = "kubectl -n kube-system create role ctrlmesh-lock-op.root --verb=get,update,patch --resource=leases.coordination.k8s.io" +
		" --resource-name=lock---op-1-normal --resource-name=lock---op-2-normal && " +
		"kubectl -n kube-system create rolebinding ctrlmesh-lock-op.root --role=ctrlmesh-lock-op.root --serviceaccount=op:sa"
	t.Run("turned off", func(t *testing.T) {
		w := newWorld(t)
		off := platform.Default()
		off.Locks.GrantAccess = false
		w.State.Settings.Store(off)
		require.NoError(t, w.Reconcile(t.Context()))
		require.Contains(t, w.forbidden(), command)
		require.Empty(t, w.roles(t))
	})
	t.Run("refused", func(t *testing.T) {
		w := newWorld(t)
		w.refuses = apierrors.NewForbidden(schema.GroupResource{Resource: "roles"}, "x", errors.New("no"))
		require.NoError(t, w.Reconcile(t.Context()))
		require.Contains(t, w.forbidden(), command)
		w.refuses = nil
		clear(w.answers)
		require.NoError(t, w.Reconcile(t.Context()))
		require.Empty(t, w.forbidden())
	})
	t.Run("another object has the name", func(t *testing.T) {
		w := newWorld(t)
		theirs := &rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "ctrlmesh-lock-op.root"}}
		require.NoError(t, w.Create(t.Context(), theirs))
		require.NoError(t, w.Reconcile(t.Context()))
		require.Contains(t, w.forbidden(), "not the mesh's")
		require.Empty(t, w.roles(t)[0].Rules)
	})
}

func TestRolesEndWithTheConfiguration(t *testing.T) {
	w := newWorld(t)
	require.NoError(t, w.Reconcile(t.Context()))
	own := &rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "of-a-user"}}
	require.NoError(t, w.Create(t.Context(), own))
	w.State.Compiled.Store(&controllers.Compiled{Listed: &controllers.Listed{}})
	require.NoError(t, w.Reconcile(t.Context()))
	roles := w.roles(t)
	require.Len(t, roles, 1)
	require.Equal(t, own.Name, roles[0].Name)
	var bindings rbacv1.RoleBindingList
	require.NoError(t, w.List(t.Context(), &bindings))
	require.Empty(t, bindings.Items)
}
