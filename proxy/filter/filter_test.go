package filter_test

import (
	"bytes"
	"io"
	"slices"
	"testing"
	"testing/iotest"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metav1beta1 "k8s.io/apimachinery/pkg/apis/meta/v1beta1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/ctrlmesh/ctrlmesh/proxy/filter"
)

const (
	jsonType  = "application/json"
	protoType = "application/vnd.kubernetes.protobuf"
)

// own is the namespace of the objects that are kept.
const own = "own"

func keep(k filter.Key) bool { return string(k.Namespace) == own }

// run filters a body, and checks that the result does not depend on the chunks.
func run(t testing.TB, o filter.Options, body []byte) ([]byte, error) {
	t.Helper()
	read := func(src io.Reader) ([]byte, error) {
		r, err := filter.New(src, keep, o)
		require.NoError(t, err)
		return io.ReadAll(r)
	}
	whole, err := read(bytes.NewReader(body))
	bytewise, bytewiseErr := read(iotest.OneByteReader(iotest.DataErrReader(bytes.NewReader(body))))
	require.Equal(t, err, bytewiseErr)
	require.Equal(t, string(whole), string(bytewise))
	return whole, err
}

func ownPods(l *corev1.PodList) *corev1.PodList {
	l = l.DeepCopy()
	l.Items = slices.DeleteFunc(l.Items, func(p corev1.Pod) bool { return p.Namespace != own })
	return l
}

func partials(l *corev1.PodList) *metav1.PartialObjectMetadataList {
	out := &metav1.PartialObjectMetadataList{ListMeta: l.ListMeta}
	for i := range l.Items {
		out.Items = append(out.Items, partial(&l.Items[i], "v1"))
	}
	return out
}

func partialsBeta(l *corev1.PodList) *metav1beta1.PartialObjectMetadataList {
	out := &metav1beta1.PartialObjectMetadataList{ListMeta: l.ListMeta}
	for i := range l.Items {
		out.Items = append(out.Items, partial(&l.Items[i], "v1beta1"))
	}
	return out
}

// A filtered list is what the apiserver would write for the objects that are kept.
func TestListsKeepWantedObjects(t *testing.T) {
	forms := map[string]func(*corev1.PodList) runtime.Object{
		"typed":        func(l *corev1.PodList) runtime.Object { return l },
		"partial":      func(l *corev1.PodList) runtime.Object { return partials(l) },
		"partial beta": func(l *corev1.PodList) runtime.Object { return partialsBeta(l) },
		"table":        func(l *corev1.PodList) runtime.Object { return table(l) },
	}
	for name, form := range forms {
		for _, media := range []string{jsonType, protoType} {
			if name == "table" && media == protoType {
				continue // is not offered
			}
			for _, n := range []int{0, 1, 3, 4, 5, 40} {
				all := pods(n)
				got, err := run(t, filter.Options{ContentType: media}, encode(t, media, form(all)))
				require.NoError(t, err, "%s %s %d", name, media, n)
				mine := ownPods(all)
				if len(mine.Items) == 0 && n > 0 {
					require.NotContains(t, string(got), "pod-")
					continue // empty is spelled otherwise than none
				}
				require.Equal(t, string(encode(t, media, form(mine))), string(got), "%s %s %d", name, media, n)
			}
		}
	}
}

func TestWatchesKeepWantedEvents(t *testing.T) {
	for _, media := range []string{jsonType, protoType} {
		var in, want []byte
		add := func(kind watch.EventType, o runtime.Object, kept bool) {
			e := event(t, media, kind, o)
			in = append(in, e...)
			if kept {
				want = append(want, e...)
			}
		}
		add(watch.Added, pod(own, "a"), true)
		add(watch.Added, pod("other", "b"), false)
		add(watch.Modified, pod(own, "a"), true)
		add(watch.Deleted, pod("other", "b"), false)
		add(watch.Bookmark, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{ResourceVersion: "9"}}, true)
		p := partial(pod(own, "a"), "v1")
		add(watch.Added, &p, true)
		p = partial(pod("other", "a"), "v1")
		add(watch.Added, &p, false)
		if media == jsonType {
			add(watch.Added, table(&corev1.PodList{Items: []corev1.Pod{*pod(own, "a")}}), true)
			add(watch.Added, table(&corev1.PodList{Items: []corev1.Pod{*pod("other", "a")}}), false)
			add(watch.Bookmark, table(&corev1.PodList{Items: []corev1.Pod{*pod("", "")}}), true)
		}
		add(watch.Error, &metav1.Status{Code: 410, Reason: metav1.StatusReasonExpired}, true)
		got, err := run(t, filter.Options{ContentType: media + ";stream=watch", Watch: true}, in)
		require.NoError(t, err)
		require.Equal(t, string(want), string(got))
	}
}
