package pods

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

// Pod is a labelled pod of this node.
type Pod struct {
	UID, Namespace, Name string
	// Trust is the pod's trust annotation; empty if the mesh did not admit it.
	Trust string
	// Capture is the capture mode that the pod was created for; empty if the agent chooses.
	Capture string
	// Addresses are those that the API or the runtime has named.
	Addresses []netip.Addr
	// HostNetwork is true for a pod without a network namespace of its own.
	HostNetwork bool
	// Static is true for a pod that the kubelet runs from a file: the API shows a mirror of
	// it, by another uid, and no admission changes the pod itself.
	Static bool
	// Created is the creation timestamp, by the apiserver's clock.
	Created time.Time
	// Ended is true once all its containers have exited for good.
	Ended bool
}

// String returns namespace/name.
func (p Pod) String() string { return p.Namespace + "/" + p.Name }

// Watcher follows the labelled pods of one node.
type Watcher struct {
	informer cache.SharedIndexInformer
}

// Watch follows the labelled pods of a node, which labelled lists and watches, until ctx ends
// and calls changed, which must not block, after each change. It returns at once.
func Watch(ctx context.Context, labelled cache.ListerWatcher, changed func()) (*Watcher, error) {
	w := &Watcher{informer: cache.NewSharedIndexInformer(labelled, &corev1.Pod{}, 0, nil)}
	if err := w.informer.SetTransform(reduce); err != nil {
		return nil, fmt.Errorf("watching pods: %w", err)
	}
	_, err := w.informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(any) { changed() },
		UpdateFunc: func(any, any) { changed() },
		DeleteFunc: func(any) { changed() },
	})
	if err != nil {
		return nil, fmt.Errorf("watching pods: %w", err)
	}
	go w.informer.RunWithContext(ctx)
	go func() {
		// An empty first list causes no event.
		if cache.WaitForCacheSync(ctx.Done(), w.informer.HasSynced) {
			changed()
		}
	}()
	return w, nil
}

// Synced reports whether the first list has arrived.
func (w *Watcher) Synced() bool { return w.informer.HasSynced() }

// List returns the labelled pods of the node, by uid.
func (w *Watcher) List() map[string]Pod {
	pods := map[string]Pod{}
	for _, o := range w.informer.GetStore().List() {
		p, ok := o.(*corev1.Pod)
		if !ok {
			continue
		}
		pods[string(p.UID)] = Pod{
			UID: string(p.UID), Namespace: p.Namespace, Name: p.Name,
			Trust:       p.Annotations[v1alpha1.TrustAnnotation],
			Capture:     p.Annotations[v1alpha1.CaptureAnnotation],
			Addresses:   addresses(p.Status.PodIPs),
			HostNetwork: p.Spec.HostNetwork,
			Static:      p.Annotations[corev1.MirrorPodAnnotationKey] != "",
			Created:     p.CreationTimestamp.Time,
			Ended:       p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed,
		}
	}
	return pods
}

// reduce keeps of a pod only what List reads.
func reduce(o any) (any, error) {
	p, ok := o.(*corev1.Pod)
	if !ok {
		return o, nil
	}
	kept := &corev1.Pod{}
	kept.Namespace, kept.Name, kept.UID, kept.ResourceVersion = p.Namespace, p.Name, p.UID, p.ResourceVersion
	kept.CreationTimestamp = p.CreationTimestamp
	for _, key := range []string{v1alpha1.TrustAnnotation, v1alpha1.CaptureAnnotation, corev1.MirrorPodAnnotationKey} {
		if v := p.Annotations[key]; v != "" {
			metav1.SetMetaDataAnnotation(&kept.ObjectMeta, key, v)
		}
	}
	kept.Spec.HostNetwork = p.Spec.HostNetwork
	kept.Status.Phase, kept.Status.PodIPs = p.Status.Phase, p.Status.PodIPs
	return kept, nil
}

func addresses(ips []corev1.PodIP) (known []netip.Addr) {
	for _, ip := range ips {
		if at, err := netip.ParseAddr(ip.IP); err == nil {
			known = append(known, at.Unmap())
		}
	}
	return known
}

// PollInterval is how often a pod is looked for whose namespace does not exist yet.
const PollInterval = 25 * time.Millisecond
