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

// held is the content of an informer's cache at the end, and the requests it sent for it.
type held struct {
	Objects  map[string]string `json:"objects"` // namespace/name to resourceVersion
	Requests []string          `json:"requests"`
}

// informerOptions are the flags of informer.
type informerOptions struct {
	resource, selector, accept, until string
	watchList                         bool
	timeout                           time.Duration
}

func parseInformer(args []string) (o informerOptions, err error) {
	flags := flag.NewFlagSet("informer", flag.ContinueOnError)
	flags.StringVar(&o.selector, "selector", "", "label selector")
	flags.BoolVar(&o.watchList, "watchlist", true, "client-go's feature WatchListClient")
	flags.StringVar(&o.accept, "accept", "application/vnd.kubernetes.protobuf", "the content type to ask for")
	flags.StringVar(&o.until, "until", "", "wait until the cache has the object of this `namespace/name`")
	flags.DurationVar(&o.timeout, "timeout", time.Minute, "how long to wait at most")
	if err := flags.Parse(args); err != nil {
		return o, err
	}
	if flags.NArg() != 1 {
		return o, errors.New("RESOURCE?")
	}
	o.resource = flags.Arg(0)
	return o, nil
}

// informer runs an informer until it is synced and has the object of -until.
func informer(ctx context.Context, args []string) (*held, error) {
	o, err := parseInformer(args)
	if err != nil {
		return nil, err
	}
	// client-go reads its features from the environment, at the first use.
	if err := os.Setenv("KUBE_FEATURE_WatchListClient", strconv.FormatBool(o.watchList)); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()

	config, err := rest.InClusterConfig()
	if err != nil {
		return nil, err
	}
	config.ContentType, config.AcceptContentTypes = o.accept, o.accept
	var asked requests
	config.Wrap(asked.wrap)
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	store, err := fill(ctx, client, o)
	if err != nil {
		return nil, err
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

// fill starts an informer and returns its cache when it is synced and has the object of -until.
func fill(ctx context.Context, client kubernetes.Interface, o informerOptions) (cache.Store, error) {
	factory := informers.NewSharedInformerFactoryWithOptions(client, 0,
		informers.WithTweakListOptions(func(l *metav1.ListOptions) { l.LabelSelector = o.selector }))
	inf, err := factory.ForResource(schema.GroupVersionResource{Version: "v1", Resource: o.resource})
	if err != nil {
		return nil, err
	}
	added := make(chan struct{}, 1)
	if _, err := inf.Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{AddFunc: func(any) {
		select {
		case added <- struct{}{}:
		default: // one is pending
		}
	}}); err != nil {
		return nil, err
	}
	factory.StartWithContext(ctx)
	if !cache.WaitForCacheSync(ctx.Done(), inf.Informer().HasSynced) {
		return nil, errors.New("not synced in time")
	}
	store := inf.Informer().GetStore()
	has := func(key string) bool {
		_, ok, _ := store.GetByKey(key) // of a store in memory; it cannot fail
		return ok
	}
	for o.until != "" && !has(o.until) {
		select {
		case <-added:
		case <-ctx.Done():
			return nil, fmt.Errorf("%s did not come in time", o.until)
		}
	}
	return store, nil
}

// requests records the URIs that a client requests.
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
