package main

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	listers "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/metadata/metadatainformer"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"

	"github.com/ctrlmesh/ctrlmesh/tests/operators/fleet/fleetv1"
)

var clusters = schema.GroupVersionResource{Group: fleetv1.Group, Version: fleetv1.Version, Resource: "clusters"}

// fleet is the clusters that the operator manages now.
type fleet struct {
	config *rest.Config
	name   string // of this process
	mu     sync.Mutex
	ends   map[string]context.CancelFunc // by cluster
}

func newFleet(config *rest.Config, name string) *fleet {
	return &fleet{config: config, name: name, ends: map[string]context.CancelFunc{}}
}

// run follows the list of clusters until the context ends.
func (f *fleet) run(ctx context.Context) error {
	client, err := metadata.NewForConfig(f.config)
	if err != nil {
		return err
	}
	factory := metadatainformer.NewSharedInformerFactory(client, 0)
	_, err = factory.ForResource(clusters).Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: func(o any) { f.join(ctx, o.(metav1.Object).GetName()) },
		DeleteFunc: func(o any) {
			if key, err := cache.DeletionHandlingMetaNamespaceKeyFunc(o); err == nil {
				f.leave(key)
			}
		},
	})
	if err != nil {
		return err
	}
	factory.Start(ctx.Done())
	<-ctx.Done()
	factory.Shutdown()
	return nil
}

// join begins to manage a cluster.
func (f *fleet) join(ctx context.Context, cluster string) {
	config := rest.CopyConfig(f.config)
	config.Host += strings.Replace(fleetv1.ClusterPaths, "*", cluster, 1)
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		slog.Error("joining a cluster failed", "cluster", cluster, "error", err)
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.ends[cluster] != nil {
		return
	}
	ctx, f.ends[cluster] = context.WithCancel(ctx)
	slog.Info("joined", "cluster", cluster)
	m := &member{client: client, by: f.name}
	go m.run(ctx)
}

// leave ends to manage a cluster.
func (f *fleet) leave(cluster string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if end := f.ends[cluster]; end != nil {
		end()
		delete(f.ends, cluster)
		slog.Info("left", "cluster", cluster)
	}
}

// member is one cluster.
type member struct {
	client kubernetes.Interface
	by     string
}

func (m *member) run(ctx context.Context) {
	factory := informers.NewSharedInformerFactoryWithOptions(m.client, 0, informers.WithTweakListOptions(func(o *metav1.ListOptions) { o.LabelSelector = fleetv1.Label }))
	jobs := factory.Core().V1().ConfigMaps()
	queue := workqueue.NewTypedRateLimitingQueue(workqueue.NewTypedItemExponentialFailureRateLimiter[cache.ObjectName](50*time.Millisecond, time.Second))
	add := func(o any) { queue.Add(cache.MetaObjectToName(o.(metav1.Object))) }
	if _, err := jobs.Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{AddFunc: add, UpdateFunc: func(_, o any) { add(o) }}); err != nil {
		slog.Error("following a cluster failed", "error", err)
		return
	}
	context.AfterFunc(ctx, queue.ShutDown)
	factory.Start(ctx.Done())
	defer factory.Shutdown()
	for {
		job, over := queue.Get()
		if over {
			return
		}
		if err := m.reconcile(ctx, jobs.Lister(), job); err != nil {
			slog.Warn("reconciling failed", "error", err)
			queue.AddRateLimited(job)
		} else {
			queue.Forget(job)
		}
		queue.Done(job)
	}
}

// reconcile does what a ConfigMap wants.
func (m *member) reconcile(ctx context.Context, jobs listers.ConfigMapLister, job cache.ObjectName) error {
	seen, err := jobs.ConfigMaps(job.Namespace).Get(job.Name)
	if apierrors.IsNotFound(err) || err == nil && seen.Data[fleetv1.Want] == seen.Data[fleetv1.Done] {
		return nil
	}
	if err != nil {
		return err
	}
	done := seen.DeepCopy()
	done.Data[fleetv1.Done], done.Data[fleetv1.By] = seen.Data[fleetv1.Want], m.by
	if _, err = m.client.CoreV1().ConfigMaps(job.Namespace).Update(ctx, done, metav1.UpdateOptions{}); err != nil {
		return fmt.Errorf("updating %s: %w", job, err)
	}
	return nil
}
