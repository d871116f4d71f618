package main

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/http/httptrace"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
)

// beat is one request and its result.
type beat struct {
	ID     string    `json:"id"` // sent as Audit-ID
	Start  time.Time `json:"start"`
	Millis float64   `json:"ms"`
	Kind   string    `json:"kind"`
	Code   int       `json:"code,omitempty"`
	Error  string    `json:"error,omitempty"`
	// Issuers of the certificates of the servers that it was sent to.
	Issuers []string `json:"issuers,omitempty"`
	// Namespaces of the answer's objects.
	Namespaces []string `json:"namespaces,omitempty"`
}

// change is an event that the informer received.
type change struct {
	Time    time.Time `json:"time"`
	Object  string    `json:"object"` // namespace/name
	Version string    `json:"version"`
}

// rhythm is the order of the kinds of requests. Every second one uses a new connection, which
// is affected by changes of the redirection at once; the others use persistent connections,
// like most clients.
var rhythm = []string{"fresh", "http2", "fresh", "http1", "fresh", "write"}

// pulse sends requests at a steady rate, without waiting for answers, and runs an informer. It
// prints a line for each beat and each change until ctx ends.
func pulse(ctx context.Context, args []string) error {
	flags := flag.NewFlagSet("pulse", flag.ContinueOnError)
	every := flags.Duration("every", 50*time.Millisecond, "the time from one request to the next")
	timeout := flags.Duration("timeout", 10*time.Second, "how long to wait for an answer")
	if err := flags.Parse(args); err != nil {
		return err
	}
	config, err := rest.InClusterConfig()
	if err != nil {
		return err
	}
	p := &pulser{config: config, timeout: *timeout, kinds: map[string]http.RoundTripper{}, printer: printer{out: json.NewEncoder(os.Stdout)}}
	for _, kind := range rhythm {
		if p.kinds[kind], err = p.transport(kind); err != nil {
			return err
		}
	}
	if err := p.inform(ctx); err != nil {
		return err
	}
	return pace(ctx, *every, func(i int) { p.print(p.ask(ctx, rhythm[i%len(rhythm)])) })
}

// pace calls do at a fixed rate, each time in a goroutine, until ctx ends.
func pace(ctx context.Context, every time.Duration, do func(i int)) error {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for i := 0; ; i++ {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
			go do(i)
		}
	}
}

type pulser struct {
	config  *rest.Config
	timeout time.Duration
	kinds   map[string]http.RoundTripper
	printer
}

func (p *pulser) transport(kind string) (http.RoundTripper, error) {
	config := rest.CopyConfig(p.config)
	switch kind {
	case "http2", "write":
		return rest.TransportFor(config)
	case "http1":
		config.NextProtos = []string{"http/1.1"}
		return rest.TransportFor(config)
	}
	tlsConfig, err := rest.TLSConfigFor(config)
	if err != nil {
		return nil, err
	}
	return rest.HTTPWrappersForConfig(config, &http.Transport{TLSClientConfig: tlsConfig, DisableKeepAlives: true})
}

func (p *pulser) ask(ctx context.Context, kind string) (b beat) {
	ctx, cancel := context.WithTimeout(ctx, p.timeout)
	defer cancel()
	b = beat{ID: string(uuid.NewUUID()), Start: time.Now(), Kind: kind}
	defer func() { b.Millis = float64(time.Since(b.Start).Microseconds()) / 1000 }()

	method, path, body := http.MethodGet, "/api/v1/configmaps?limit=500", ""
	accept := "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
	if kind == "write" { // a write that creates no object
		accept, method, path = "application/json", http.MethodPost, "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
		body = `{"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview", "spec": {"resourceAttributes": {"verb": "get", "resource": "pods"}}}`
	}
	// The issuers are recorded also for a request without an answer, and for each attempt of
	// a request that the transport retries.
	var mu sync.Mutex
	ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{GotConn: func(got httptrace.GotConnInfo) {
		if conn, ok := got.Conn.(*tls.Conn); ok {
			mu.Lock()
			defer mu.Unlock()
			b.Issuers = append(b.Issuers, conn.ConnectionState().PeerCertificates[0].Issuer.String())
		}
	}})
	defer func() {
		mu.Lock() // another attempt may be in flight
		defer mu.Unlock()
		b.Issuers = slices.Clone(b.Issuers)
	}()
	req, err := http.NewRequestWithContext(ctx, method, p.config.Host+path, strings.NewReader(body))
	if err != nil {
		b.Error = err.Error()
		return b
	}
	req.Header.Set("Accept", accept)
	req.Header.Set("Audit-ID", b.ID)
	req.Header.Set("Content-Type", "application/json")
	resp, err := p.kinds[kind].RoundTrip(req)
	if err != nil {
		b.Error = err.Error()
		return b
	}
	defer func() { _ = resp.Body.Close() }()
	b.Code = resp.StatusCode
	var list struct {
		Items []struct {
			Metadata struct{ Namespace string }
		}
	}
	if resp.StatusCode >= http.StatusBadRequest {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 1000)) // as much as arrives
		b.Error = string(text)
	} else if err := json.NewDecoder(resp.Body).Decode(&list); err != nil {
		b.Error = fmt.Sprintf("reading the answer: %v", err)
	}
	for _, item := range list.Items {
		b.Namespaces = append(b.Namespaces, item.Metadata.Namespace)
	}
	slices.Sort(b.Namespaces)
	b.Namespaces = slices.Compact(b.Namespaces)
	return b
}

// inform starts an informer with a user agent of its own, which distinguishes its requests.
func (p *pulser) inform(ctx context.Context) error {
	config := rest.CopyConfig(p.config)
	config.UserAgent = "probe-informer"
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	factory := informers.NewSharedInformerFactory(client, 0)
	handle := func(obj any) {
		if o, err := meta.Accessor(obj); err == nil {
			p.print(change{time.Now(), o.GetNamespace() + "/" + o.GetName(), o.GetResourceVersion()})
		}
	}
	if _, err := factory.Core().V1().ConfigMaps().Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    handle,
		UpdateFunc: func(_, obj any) { handle(obj) },
	}); err != nil {
		return errors.Join(errors.New("watching ConfigMaps"), err)
	}
	factory.StartWithContext(ctx)
	return nil
}
