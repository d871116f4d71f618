// Package kube is an agent's client of the apiserver. It has the kinds that agents read and
// write, and none of the clientset of all APIs, which would take 10 MB of memory on each node.
package kube

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/failure"
)

// Client reads and writes at the apiserver.
type Client struct{ core, events rest.Interface }

// New returns a Client. It does not connect.
func New(config *rest.Config) (*Client, error) {
	scheme := runtime.NewScheme()
	scheme.AddKnownTypes(corev1.SchemeGroupVersion, &corev1.Pod{}, &corev1.PodList{}, &corev1.ConfigMap{})
	scheme.AddKnownTypes(eventsv1.SchemeGroupVersion, &eventsv1.Event{})
	codecs := serializer.NewCodecFactory(scheme).WithoutConversion()
	group := func(path string, version schema.GroupVersion) (rest.Interface, error) {
		metav1.AddToGroupVersion(scheme, version)
		c := rest.CopyConfig(config)
		c.APIPath, c.GroupVersion, c.NegotiatedSerializer = path, &version, codecs
		return rest.RESTClientFor(c)
	}
	core, err := group("/api", corev1.SchemeGroupVersion)
	if err != nil {
		return nil, failure.Wrap(err, "making the apiserver client")
	}
	events, err := group("/apis", eventsv1.SchemeGroupVersion)
	return &Client{core, events}, failure.Wrap(err, "making the apiserver client of Events")
}

// Pods lists and watches the labelled pods of a node.
func (c *Client) Pods(node string) cache.ListerWatcher {
	return cache.NewFilteredListWatchFromClient(c.core, "pods", metav1.NamespaceAll, func(o *metav1.ListOptions) {
		o.FieldSelector = fields.OneTermEqualSelector("spec.nodeName", node).String()
		o.LabelSelector = v1alpha1.EnableProxyLabel + "=true"
	})
}

// ConfigMap reads a ConfigMap.
func (c *Client) ConfigMap(ctx context.Context, namespace, name string) (*corev1.ConfigMap, error) {
	cm := &corev1.ConfigMap{}
	return cm, c.core.Get().Namespace(namespace).Resource("configmaps").Name(name).Do(ctx).Into(cm)
}
