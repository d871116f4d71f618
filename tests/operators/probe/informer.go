package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net/http"
	"os"
	"strconv"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
)

// held is what an informer holds in the end, and what it asked to get there.
type held struct {
	Objects  map[string]string `json:"objects"` // namespace/name to resourceVersion
	Requests []string          `json:"requests"`
}

func informer(ctx context.Context, args []string) (*held, error) {
	flags := flag.NewFlagSet("informer", flag.ContinueOnError)
	selector := flags.String("selector", "", "label selector")
	watchList := flags.Bool("watchlist", true, "client-go's feature WatchListClient")
	accept := flags.String("accept", "application/vnd.kubernetes.protobuf", "the content type to ask for")
	last := flags.String("until", "", "wait until it holds the object of this `namespace/name`, and end then")
	timeout := flags.Duration("timeout", time.Minute, "how long to wait at most")
	if err := flags.Parse(args); err != nil {
		return nil, err
	}
	if flags.NArg() != 1 {
		return nil, errors.New("RESOURCE?")
	}
	// client-go reads its features from the environment, when first asked.
	if err := os.Setenv("KUBE_FEATURE_WatchListClient", strconv.FormatBool(*watchList)); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, *timeout)
	defer cancel()

	config, err := rest.InClusterConfig()
	if err != nil {
		return nil, err
	}
	config.ContentType, config.AcceptContentTypes = *accept, *accept
	var asked requests
	config.Wrap(asked.wrap)
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	factory := informers.NewSharedInformerFactoryWithOptions(client, 0,
		informers.WithTweakListOptions(func(o *metav1.ListOptions) { o.LabelSelector = *selector }))
	inf, err := factory.ForResource(schema.GroupVersionResource{Version: "v1", Resource: flags.Arg(0)})
	if err != nil {
		return nil, err
	}
	added := make(chan struct{}, 1)
	if _, err := inf.Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{AddFunc: func(any) {
		select {
		case added <- struct{}{}:
		default: // it is told already
		}
	}}); err != nil {
		return nil, err
	}
	factory.StartWithContext(ctx)
	if !cache.WaitForCacheSync(ctx.Done(), inf.Informer().HasSynced) {
		return nil, errors.New("not synced in time")
	}
	store := inf.Informer().GetStore()
	holds := func(key string) bool {
		_, ok, _ := store.GetByKey(key) // of a store in memory; it cannot fail
		return ok
	}
	for *last != "" && !holds(*last) {
		select {
		case <-added:
		case <-ctx.Done():
			return nil, fmt.Errorf("%s did not come in time", *last)
		}
	}
	out := &held{Objects: map[string]string{}, Requests: asked.all()}
	for _, obj := range store.List() {
		o, err := meta.Accessor(obj)
		if err != nil {
			return nil, err
		}
		out.Objects[o.GetNamespace()+"/"+o.GetName()] = o.GetResourceVersion()
	}
	return out, nil
}

// requests notes what a client asks.
type requests struct {
	mu   sync.Mutex
	uris []string
}

func (r *requests) wrap(next http.RoundTripper) http.RoundTripper {
	return roundTripper(func(req *http.Request) (*http.Response, error) {
		r.mu.Lock()
		r.uris = append(r.uris, req.URL.RequestURI())
		r.mu.Unlock()
		return next.RoundTrip(req)
	})
}

func (r *requests) all() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]string(nil), r.uris...)
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(req *http.Request) (*http.Response, error) { return f(req) }
