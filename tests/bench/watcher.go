package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"time"

	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

// runInformer runs a client like an operator's: one informer of the namespace's ConfigMaps.
// It prints a line when the informer has synced.
func runInformer(ctx context.Context, o options) error {
	config, err := rest.InClusterConfig()
	if err != nil {
		return err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	factory := informers.NewSharedInformerFactoryWithOptions(client, 0, informers.WithNamespace(o.namespace))
	configMaps := factory.Core().V1().ConfigMaps()
	configMaps.Informer()
	factory.Start(ctx.Done())
	factory.WaitForCacheSync(ctx.Done())
	fmt.Println("synced")
	<-ctx.Done()
	return nil
}

// watchAgain is how long a watcher waits after a refusal. Informers wait longer, but the agent
// is measured, not the client.
const watchAgain = 200 * time.Millisecond

// runWatcher runs a client that keeps one watch of the namespace's ConfigMaps open, and opens
// the next when it ends. It prints whether each watch was answered.
func runWatcher(ctx context.Context, o options) error {
	config, err := rest.InClusterConfig()
	if err != nil {
		return err
	}
	client, err := rest.HTTPClientFor(config)
	if err != nil {
		return err
	}
	url := config.Host + collection(o.namespace) + "?watch=true&resourceVersion=0"
	for ctx.Err() == nil {
		if err := watchOnce(ctx, client, url); err != nil {
			fmt.Println(time.Now().UnixNano(), "refused", err)
			_ = kube.Sleep(ctx, watchAgain)
		}
	}
	return nil
}

// watchOnce returns nil when a watch that was answered has ended, for any reason.
func watchOnce(ctx context.Context, client *http.Client, url string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusOK {
		reason, _ := io.ReadAll(io.LimitReader(resp.Body, 1<<10))
		return fmt.Errorf("%s: %q", resp.Status, reason)
	}
	fmt.Println(time.Now().UnixNano(), "answered")
	if _, err := io.Copy(io.Discard, resp.Body); err != nil {
		fmt.Println(time.Now().UnixNano(), "cut", err)
	}
	return nil
}
