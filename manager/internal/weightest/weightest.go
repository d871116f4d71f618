// Package weightest fakes an apiserver whose objects are counted.
package weightest

import (
	"maps"
	"slices"
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/metadata/fake"
	clienttesting "k8s.io/client-go/testing"
)

// APIServer has ConfigMaps in namespaces, and counts the lists of each.
type APIServer struct {
	mu      sync.Mutex
	objects map[string]int64
	lists   map[string]int
	fail    func(namespace string) error
}

// New returns an apiserver with these numbers of objects.
func New(objects map[string]int64) *APIServer {
	return &APIServer{objects: objects, lists: map[string]int{}}
}

// Fail makes lists fail with the error that f returns for their namespace.
func (a *APIServer) Fail(f func(namespace string) error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.fail = f
}

// Add adds objects to a namespace.
func (a *APIServer) Add(namespace string, objects int64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.objects[namespace] += objects
}

// Objects returns the numbers of objects by namespace.
func (a *APIServer) Objects() map[string]int64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	return maps.Clone(a.objects)
}

// Namespaces returns the names of the namespaces, sorted.
func (a *APIServer) Namespaces() []string { return slices.Sorted(maps.Keys(a.Objects())) }

// Lists returns how often the objects of a namespace were listed.
func (a *APIServer) Lists(namespace string) int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.lists[namespace]
}

// Metadata returns a client of the apiserver.
func (a *APIServer) Metadata() metadata.Interface {
	client := fake.NewSimpleMetadataClient(fake.NewTestScheme())
	client.PrependReactor("list", "*", a.list)
	return client
}

// Served lists the resources of the apiserver.
func (a *APIServer) Served() ([]*metav1.APIResourceList, error) {
	return []*metav1.APIResourceList{{GroupVersion: "v1", APIResources: []metav1.APIResource{
		{Name: "configmaps", Kind: "ConfigMap", Namespaced: true, Verbs: []string{"list", "patch"}},
		{Name: "clusters", Kind: "Cluster", Verbs: []string{"list"}},
	}}}, nil
}

func (a *APIServer) list(action clienttesting.Action) (bool, runtime.Object, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	ns := action.GetNamespace()
	a.lists[ns]++
	if a.fail != nil {
		if err := a.fail(ns); err != nil {
			return true, nil, err
		}
	}
	if ns == metav1.NamespaceAll { // one object for each key, with its name
		all := &metav1.List{}
		for _, name := range slices.Sorted(maps.Keys(a.objects)) {
			all.Items = append(all.Items, runtime.RawExtension{Object: &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Name: name}}})
		}
		return true, all, nil
	}
	n := a.objects[ns]
	if n == 0 {
		return true, &metav1.List{}, nil
	}
	return true, &metav1.List{
		ListMeta: metav1.ListMeta{RemainingItemCount: new(n - 1)},
		Items:    []runtime.RawExtension{{Object: &metav1.PartialObjectMetadata{}}},
	}, nil
}
