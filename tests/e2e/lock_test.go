package e2e

import (
	"fmt"
	"maps"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

const (
	inJSON     = runtime.ContentTypeJSON
	inProtobuf = runtime.ContentTypeProtobuf
)

// Members see a lock under its own name; upstream it has another name. This is so for every
// kind of lock and every content type.
func TestLockIsRenamedUpstreamOnly(t *testing.T) {
	t.Parallel()
	ns := namespace(t, "lock")
	lock := ns // so that the path contains the name twice
	probeRights(t, ns)
	c := shard(ns, "s", []string{"member"}, []string{owned(t)}, "configmaps")
	c.Spec.Controller = &meshv1alpha1.ControllerConfig{LeaderElectionName: lock}
	create(t, c, netPod(ns, "member", nodes(t)[0]))
	pod := ready(t, ns, "member")
	settled(t, ns, "s", 1)
	config := from(t, pod)

	for _, contentType := range []string{inJSON, inProtobuf} {
		for _, kind := range []struct {
			object client.Object
			list   client.ObjectList
		}{
			{&coordinationv1.Lease{}, &coordinationv1.LeaseList{}},
			{&corev1.ConfigMap{}, &corev1.ConfigMapList{}},
			{&corev1.Endpoints{}, &corev1.EndpointsList{}}, //nolint:staticcheck // operators of old elect by them
		} {
			t.Run(fmt.Sprintf("%T in %s", kind.object, contentType), func(t *testing.T) {
				l := lockTest{
					object: kind.object, list: kind.list,
					key:    client.ObjectKey{Namespace: ns, Name: lock},
					upKey:  client.ObjectKey{Namespace: ns, Name: lock + "---s"},
					member: clientOf(t, config, contentType),
					// As in all locks of this kind: the controller of Endpoints deletes those without, and without a Service.
					marks: map[string]string{resourcelock.LeaderElectionRecordAnnotationKey: "{}"},
				}
				l.run(t)
			})
		}
	}
	t.Run("unknown fields reach the apiserver", func(t *testing.T) {
		clientset, err := kubernetes.NewForConfig(config)
		require.NoError(t, err)
		body := fmt.Sprintf(`{"metadata": {"fieldOfTheFuture": 1, "name": %q}, "another": [{}]}`, lock)
		err = clientset.CoreV1().RESTClient().Post().AbsPath("/api/v1/namespaces", ns, "configmaps").
			Param("fieldValidation", "Strict").SetHeader("Content-Type", inJSON).Body([]byte(body)).Do(t.Context()).Error()
		require.ErrorContains(t, err, `unknown field "another"`)
		require.ErrorContains(t, err, `unknown field "metadata.fieldOfTheFuture"`)
	})
}

func clientOf(t *testing.T, config *rest.Config, contentType string) client.WithWatch {
	t.Helper()
	config = rest.CopyConfig(config)
	config.ContentType, config.AcceptContentTypes = contentType, contentType
	c, err := client.NewWithWatch(config, client.Options{Scheme: cluster.Scheme(), Mapper: cluster.RESTMapper()})
	require.NoError(t, err)
	return c
}

// lockTest does to a lock of one kind all that an operator may do.
type lockTest struct {
	object     client.Object
	list       client.ObjectList
	key, upKey client.ObjectKey
	member     client.WithWatch
	marks      map[string]string // annotations: each step adds one, which stays
}

func (l *lockTest) run(t *testing.T) {
	err := l.member.Get(t.Context(), l.key, l.new())
	require.True(t, apierrors.IsNotFound(err), "%v", err)
	require.NotContains(t, err.Error(), l.upKey.Name)
	events := l.watch(t)

	l.create(t)
	l.awaits(t, events, watch.Added)
	l.createAgain(t)

	got := l.new()
	l.check(t, got, l.member.Get(t.Context(), l.key, got))
	got.SetAnnotations(l.mark("update"))
	l.check(t, got, l.member.Update(t.Context(), got))
	l.awaits(t, events, watch.Modified)
	l.patch(t, got)
	l.apply(t)
	l.listByName(t)

	require.NoError(t, l.member.Delete(t.Context(), got))
	require.True(t, apierrors.IsNotFound(cluster.Get(t.Context(), l.upKey, l.new())))
	l.awaits(t, events, watch.Deleted)
}

// mark adds the annotation of a step, and returns all so far.
func (l *lockTest) mark(step string) map[string]string {
	l.marks[step] = "was here"
	return maps.Clone(l.marks)
}

// check requires that the member has the lock under its own name, and that the apiserver has
// it under the shard's, with all marks.
func (l *lockTest) check(t *testing.T, got client.Object, err error) {
	t.Helper()
	require.NoError(t, err)
	require.Equal(t, l.key, client.ObjectKeyFromObject(got))
	require.Equal(t, l.marks, got.GetAnnotations())
	up := l.new()
	require.NoError(t, cluster.Get(t.Context(), l.upKey, up))
	require.Equal(t, l.marks, up.GetAnnotations())
	require.Equal(t, "kept", up.GetLabels()["other"])
	require.Equal(t, got.GetUID(), up.GetUID())
	if _, isLease := l.object.(*coordinationv1.Lease); isLease {
		heldByMesh(t, l.key)
	} else {
		require.True(t, apierrors.IsNotFound(cluster.Get(t.Context(), l.key, l.new())), "nothing has the plain name upstream")
	}
}

func (l *lockTest) create(t *testing.T) {
	t.Helper()
	obj := l.named()
	obj.SetLabels(map[string]string{"other": "kept"})
	obj.SetAnnotations(l.mark("create"))
	l.check(t, obj, l.member.Create(t.Context(), obj))
}

func (l *lockTest) createAgain(t *testing.T) {
	t.Helper()
	err := l.member.Create(t.Context(), l.named())
	require.True(t, apierrors.IsAlreadyExists(err), "%v", err)
	require.NotContains(t, err.Error(), l.upKey.Name)
}

// patch patches the lock in each of the three formats.
func (l *lockTest) patch(t *testing.T, got client.Object) {
	t.Helper()
	l.mark("merge-patch")
	l.check(t, got, l.member.Patch(t.Context(), got, client.RawPatch(types.MergePatchType,
		fmt.Appendf(nil, `{"metadata": {"annotations": {"merge-patch": "was here"}, "name": %q}}`, l.key.Name))))
	l.mark("strategic-merge-patch")
	l.check(t, got, l.member.Patch(t.Context(), got, client.RawPatch(types.StrategicMergePatchType,
		fmt.Appendf(nil, `{"metadata": {"name": %q, "annotations": {"strategic-merge-patch": "was here"}}}`, l.key.Name))))
	l.mark("json-patch")
	l.check(t, got, l.member.Patch(t.Context(), got, client.RawPatch(types.JSONPatchType,
		fmt.Appendf(nil, `[{"op": "test", "path": "/metadata/name", "value": %q},
			{"op": "add", "path": "/metadata/annotations/json-patch", "value": "was here"}]`, l.key.Name))))
}

// apply changes the lock by server-side apply.
func (l *lockTest) apply(t *testing.T) {
	t.Helper()
	apply := &unstructured.Unstructured{}
	gvk, err := cluster.GroupVersionKindFor(l.object)
	require.NoError(t, err)
	apply.SetGroupVersionKind(gvk)
	apply.SetName(l.key.Name)
	apply.SetNamespace(l.key.Namespace)
	apply.SetAnnotations(map[string]string{"apply": "was here"})
	l.mark("apply")
	l.check(t, apply, l.member.Apply(t.Context(), client.ApplyConfigurationFromUnstructured(apply), client.FieldOwner("e2e")))
}

func (l *lockTest) listByName(t *testing.T) {
	t.Helper()
	byName := client.MatchingFields{"metadata.name": l.key.Name}
	require.NoError(t, l.member.List(t.Context(), l.list, client.InNamespace(l.key.Namespace), byName))
	found, err := meta.ExtractList(l.list)
	require.NoError(t, err)
	require.Len(t, found, 1)
	l.check(t, found[0].(client.Object), nil)
}

// named returns an empty object under the member's name for the lock.
func (l *lockTest) named() client.Object {
	obj := l.new()
	obj.SetName(l.key.Name)
	obj.SetNamespace(l.key.Namespace)
	return obj
}

func (l *lockTest) new() client.Object { return l.object.DeepCopyObject().(client.Object) }

// watch follows the lock as an operator's informer for one object would.
func (l *lockTest) watch(t *testing.T) <-chan watch.Event {
	t.Helper()
	w, err := l.member.Watch(t.Context(), l.list, client.InNamespace(l.key.Namespace), client.MatchingFields{"metadata.name": l.key.Name})
	require.NoError(t, err)
	t.Cleanup(w.Stop)
	return w.ResultChan()
}

// awaits waits for an event. The name is the plain one in all of them.
func (l *lockTest) awaits(t *testing.T, events <-chan watch.Event, kind watch.EventType) {
	t.Helper()
	timeout := time.After(patience)
	for {
		select {
		case e, open := <-events:
			require.True(t, open, "the watch ended before %s", kind)
			obj, ok := e.Object.(metav1.Object)
			require.True(t, ok, "%s of %T", e.Type, e.Object)
			require.Equal(t, l.key, types.NamespacedName{Namespace: obj.GetNamespace(), Name: obj.GetName()})
			if e.Type == kind {
				return
			}
		case <-timeout:
			require.Fail(t, "no event", "%s", kind)
		}
	}
}
