package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/go-logr/logr"
	"gomodules.xyz/jsonpatch/v2"
	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	"github.com/ctrlmesh/ctrlmesh/internal/processors"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/proxy"
	"github.com/ctrlmesh/ctrlmesh/proxy/review"
	"github.com/ctrlmesh/ctrlmesh/proxy/review/route"
)

// Two pods have a webhook each. The first owns namespace here, the second namespace there.
const here, there = "here", "there"

// runReviews compares reviews that are sent to the first pod: those that it answers, and those
// that are forwarded to the second.
func runReviews(ctx context.Context, o options, dir string) error {
	o.cert = filepath.Join(dir, "serving.pem")
	cert, err := writeCertificate(o.cert)
	if err != nil {
		return err
	}
	webhooks := make([]string, 2)
	for i := range webhooks {
		if _, webhooks[i], err = start(ctx, o.forProxy("webhook")); err != nil {
			return fmt.Errorf("starting a webhook: %w", err)
		}
	}
	pid, addr, err := start(ctx, append(o.forProxy("router"), "-webhooks", strings.Join(webhooks, ",")))
	if err != nil {
		return fmt.Errorf("starting ctrlmesh: %w", err)
	}
	all := []*subject{{name: direct, clients: newClients(webhooks[0], cert, "")}, {name: ctrlmesh, pid: pid, clients: newClients(addr, cert, "")}}
	var rows []row
	for _, of := range []struct{ name, namespace string }{{"answered here", here}, {"forwarded", there}} {
		r, err := reviewOf(of.namespace)
		if err != nil {
			return err
		}
		for _, s := range all {
			by := webhooks[0]
			if s.name == ctrlmesh && of.namespace == there {
				by = webhooks[1]
			}
			if err := warmReviews(ctx, s, r, by); err != nil {
				return fmt.Errorf("%s, %s: %w", s.name, of.name, err)
			}
		}
		rows = append(rows,
			row{"review, " + of.name + ", one at a time", "review", false, loop{request: r, workers: 1, lasts: getTurn}.run},
			row{"review, " + of.name + ", 32 at a time on 4 connections", "review", false, loop{request: r, workers: 32, lasts: getTurn}.run})
	}
	if rows, err = o.wanted(rows); err != nil || len(rows) == 0 {
		return err
	}
	results, err := measure(ctx, o.rounds, rows, all)
	if err != nil {
		return err
	}
	report(os.Stdout, rows, all, results, direct)
	return nil
}

// reviewOf returns the review of the creation of an object of 1 KB.
func reviewOf(namespace string) (request, error) {
	body, err := json.Marshal(&admissionv1.AdmissionReview{
		TypeMeta: metav1.TypeMeta{Kind: "AdmissionReview", APIVersion: "admission.k8s.io/v1"},
		Request: &admissionv1.AdmissionRequest{
			UID: "bench", Kind: metav1.GroupVersionKind{Version: "v1", Kind: "ConfigMap"},
			Resource: metav1.GroupVersionResource{Version: "v1", Resource: "configmaps"},
			Name:     "a", Namespace: namespace, Operation: admissionv1.Create,
			Object: runtime.RawExtension{Raw: configMap("a", noTime, nil)},
		},
	})
	return request{method: http.MethodPost, path: "/", accept: anyType, body: body}, err
}

// warmReviews opens all connections, and requires that the expected webhook answers.
func warmReviews(ctx context.Context, s *subject, r request, by string) error {
	for _, c := range s.clients {
		for range 20 {
			resp, err := c.send(ctx, r)
			if err != nil {
				return err
			}
			answer, err := io.ReadAll(resp.Body)
			_ = resp.Body.Close()
			if err != nil {
				return err
			}
			if !strings.Contains(string(answer), by) {
				return fmt.Errorf("the webhook at %s did not answer: %s", by, answer)
			}
		}
	}
	return nil
}

// serveWebhook runs a webhook of controller-runtime, which sets a label. Its answers name its
// address.
func serveWebhook(ctx context.Context, o options) error {
	l, err := inherited()
	if err != nil {
		return err
	}
	ctrl.SetLogger(logr.Discard())
	address := l.Addr().String()
	decoder := admission.NewDecoder(runtime.NewScheme())
	handler, err := admission.StandaloneWebhook(&admission.Webhook{Handler: admission.HandlerFunc(func(_ context.Context, req admission.Request) admission.Response {
		object := &corev1.ConfigMap{}
		if err := decoder.DecodeRaw(req.Object, object); err != nil {
			return admission.Errored(http.StatusBadRequest, err)
		}
		return admission.Patched(address, jsonpatch.NewOperation("add", "/metadata/labels", map[string]string{"reviewed": object.Name}))
	})}, admission.StandaloneOptions{})
	if err != nil {
		return err
	}
	server := &http.Server{Handler: handler}
	context.AfterFunc(ctx, func() { _ = server.Close() })
	if err := server.ServeTLS(l, o.cert, o.cert); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// serveRouter runs ctrlmesh's data plane for two pods, as the agents of two nodes do. The second
// pod has another address of the loopback, with the port of the first.
func serveRouter(ctx context.Context, o options) error {
	leaf, err := tls.LoadX509KeyPair(o.cert, o.cert)
	if err != nil {
		return err
	}
	server, err := newProxy(&leaf)
	if err != nil {
		return err
	}
	go processors.Adapt(ctx)
	first, err := inherited()
	if err != nil {
		return err
	}
	at, err := netip.ParseAddrPort(first.Addr().String())
	if err != nil {
		return err
	}
	other := netip.AddrPortFrom(at.Addr().Next(), at.Port())
	second, err := net.Listen("tcp", other.String())
	if err != nil {
		return err
	}
	root, err := x509.ParseCertificate(leaf.Certificate[0])
	if err != nil {
		return err
	}
	pool := x509.NewCertPool()
	pool.AddCert(root)
	routes := review.Routes{
		Routes: route.Routes{Default: there, Owners: []route.Owner{
			{Shard: here, Scope: sharding.Keys(here)}, {Shard: there, Scope: sharding.Keys(there)},
		}},
		Pods:        map[string][]netip.Addr{here: {at.Addr()}, there: {other.Addr()}},
		Authorities: map[string]*x509.CertPool{serverName: pool},
	}
	webhooks := strings.Split(o.webhooks, ",")
	failed := make(chan error, len(webhooks))
	for i, shard := range []string{here, there} {
		l, self := []net.Listener{first, second}[i], []netip.AddrPort{at, other}[i].String()
		pod := server.Pod(proxy.PodInfo{UID: shard, Namespace: "bench", Name: shard}, func(ctx context.Context, network, addr string) (net.Conn, error) {
			if addr == self { // capture leaves connections of a pod to itself alone
				addr = webhooks[i]
			}
			return (&net.Dialer{}).DialContext(ctx, network, addr)
		})
		own := routes
		own.Shard = shard
		pod.Reviews().SetRoutes(&own)
		pod.Reviews().SetCertificate(&leaf)
		context.AfterFunc(ctx, func() {
			now, cancel := context.WithTimeout(context.Background(), time.Second)
			defer cancel()
			_ = pod.Shutdown(now)
		})
		go func() { failed <- pod.Reviews().Serve(l) }()
	}
	return errors.Join(<-failed, <-failed)
}
