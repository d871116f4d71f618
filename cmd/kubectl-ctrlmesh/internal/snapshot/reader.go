package snapshot

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/version"
	"sigs.k8s.io/controller-runtime/pkg/client"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/dialect/serve"
)

// pageSize is how many objects one request lists.
const pageSize = 500

// NewScheme returns the scheme of the objects that are read.
func NewScheme() (*runtime.Scheme, error) {
	s := runtime.NewScheme()
	return s, errors.Join(clientgoscheme.AddToScheme(s), apiextensionsv1.AddToScheme(s), v1alpha1.AddToScheme(s), serve.AddToScheme(s))
}

// Reader reads snapshots.
type Reader struct {
	// Client reads, and reviews the user's own access. Commands that change something write with it.
	Client client.Client
	// Version returns the version of the apiserver.
	Version func() (*version.Info, error)
	// Resources returns the lists of resources that the apiserver serves, the preferred versions first.
	Resources func() ([]*metav1.APIResourceList, error)
	// Logs returns the log of a pod. It ends with the context.
	Logs func(ctx context.Context, namespace, pod string, options *corev1.PodLogOptions) (io.ReadCloser, error)
	// Metrics returns the metrics of a pod of the mesh, in the text format of Prometheus.
	Metrics func(ctx context.Context, pod *corev1.Pod) (io.ReadCloser, error)
	// Now returns the time at the apiserver.
	Now func() time.Time
	// Namespace of the mesh.
	Namespace string
}

// Served returns the lists of resources that the apiserver serves. incomplete is why some groups are not
// among them.
func (r Reader) Served() (lists []*metav1.APIResourceList, incomplete, err error) {
	lists, incomplete = r.Resources()
	if len(lists) == 0 && incomplete != nil {
		return nil, nil, fmt.Errorf("reading which resources are served: %w: check the connection to the apiserver", incomplete)
	}
	return lists, incomplete, nil
}

// Part is a part of a snapshot.
type Part struct {
	what string
	read func(context.Context, Reader, *Snapshot) error
}

// Read reads parts, in order. Unread names the parts that it failed to read. It returns an error if the
// apiserver cannot be reached at all.
func (r Reader) Read(ctx context.Context, parts ...Part) (*Snapshot, error) {
	info, err := r.Version()
	if err != nil {
		return nil, fmt.Errorf("reading the version of the apiserver: %w", err)
	}
	s := &Snapshot{
		Namespace: r.Namespace, Kubernetes: info.GitVersion, Now: r.Now(),
		Outside: map[types.NamespacedName]bool{}, Leases: map[types.NamespacedName]coordinationv1.Lease{}, LeasesRead: map[string]bool{}, Exists: map[string]bool{},
	}
	return s, r.Extend(ctx, s, parts...)
}

// ReadAll reads parts, in order, all of which are necessary. It returns an error that names all that it
// failed to read.
func (r Reader) ReadAll(ctx context.Context, parts ...Part) (*Snapshot, error) {
	s, err := r.Read(ctx, parts...)
	if err == nil {
		err = s.Err()
	}
	if err != nil {
		return nil, Unreadable(err)
	}
	return s, nil
}

// Unreadable adds to the error of a necessary part what a user can do.
func Unreadable(err error) error {
	return fmt.Errorf("%w: check the connection to the apiserver, and your permissions", err)
}

// UIDOf returns the uid of an object; empty if it does not exist.
func (r Reader) UIDOf(ctx context.Context, kind schema.GroupVersionKind, namespace, name string) (types.UID, error) {
	o := &metav1.PartialObjectMetadata{}
	o.SetGroupVersionKind(kind)
	err := r.Client.Get(ctx, types.NamespacedName{Namespace: namespace, Name: name}, o)
	if Absent(err) {
		return "", nil
	}
	return o.UID, err
}

// Extend reads more parts into a snapshot. It returns an error if the context ends.
func (r Reader) Extend(ctx context.Context, s *Snapshot, parts ...Part) error {
	for _, p := range parts {
		if err := p.read(ctx, r, s); err != nil {
			s.Unread = append(s.Unread, Unread{p.what, err})
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
	return nil
}

// list calls use for each object of a list that is read page by page.
func list[L any, P interface {
	*L
	client.ObjectList
}](ctx context.Context, r Reader, use func(L), opts ...client.ListOption) error {
	return pages(ctx, r, func() P { return new(L) }, func(page P) error {
		use(*page)
		return nil
	}, opts...)
}

// EachPage calls use for objects of any kind, page by page, until it returns an error.
func (r Reader) EachPage(ctx context.Context, kind schema.GroupVersionKind, use func([]unstructured.Unstructured) error, opts ...client.ListOption) error {
	empty := func() *unstructured.UnstructuredList {
		page := &unstructured.UnstructuredList{}
		page.SetGroupVersionKind(kind.GroupVersion().WithKind(kind.Kind + "List"))
		return page
	}
	return pages(ctx, r, empty, func(page *unstructured.UnstructuredList) error { return use(page.Items) }, opts...)
}

// pages lists objects page by page, until use returns an error.
func pages[L client.ObjectList](ctx context.Context, r Reader, empty func() L, use func(L) error, opts ...client.ListOption) error {
	for next := ""; ; {
		page := empty()
		if err := r.Client.List(ctx, page, append(slices.Clone(opts), client.Limit(pageSize), client.Continue(next))...); err != nil {
			return err
		}
		if err := use(page); err != nil {
			return err
		}
		if next = page.GetContinue(); next == "" {
			return nil
		}
	}
}

// get reads an object. It returns nil if the object, or its kind, does not exist.
func get[O any, P interface {
	*O
	client.Object
}](ctx context.Context, r Reader, namespace, name string) (*O, error) {
	out := P(new(O))
	err := r.Client.Get(ctx, types.NamespacedName{Namespace: namespace, Name: name}, out)
	if Absent(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return (*O)(out), nil
}

// collect reads objects by their names into a map, without those that do not exist.
func collect[O any, P interface {
	*O
	client.Object
}](ctx context.Context, r Reader, namespace string, names []string) (map[string]O, error) {
	out := map[string]O{}
	var errs []error
	for _, name := range names {
		o, err := get[O, P](ctx, r, namespace, name)
		if err != nil {
			errs = append(errs, err)
		} else if o != nil {
			out[name] = *o
		}
	}
	return out, errors.Join(errs...)
}

// Absent reports whether an error means that an object or its kind does not exist.
func Absent(err error) bool { return apierrors.IsNotFound(err) || meta.IsNoMatchError(err) }
