// Gateway is an aggregated API for the tests that passes requests on to member clusters, as those of
// Karmada and Karpor do: those for /apis/GROUP/VERSION/clusters/NAME/proxy/PATH reach PATH in a member.
// A member sees the user whom the aggregating apiserver names, by the certificate of its front proxy.
//
//	gateway -certificates DIR -member m1=https://10.99.0.101:6443 -member ...
//
// DIR has ca.crt, tls.crt and tls.key. It does not use the mesh.
package main

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/cert"

	"github.com/ctrlmesh/ctrlmesh/tests/operators/fleet/fleetv1"
)

func main() {
	if err := run(); err != nil {
		slog.Error("gateway failed", "error", err)
		os.Exit(1)
	}
}

func run() error {
	members := map[string]*url.URL{}
	flag.Func("member", "name=URL of a member's apiserver", func(s string) error {
		name, at, ok := strings.Cut(s, "=")
		if !ok {
			return errors.New("want name=URL")
		}
		u, err := url.Parse(at)
		members[name] = u
		return err
	})
	dir := flag.String("certificates", "/certificates", "directory with ca.crt, tls.crt and tls.key of the front proxy")
	flag.Parse()
	transport, err := frontProxy(*dir)
	if err != nil {
		return err
	}
	serving, err := selfSigned()
	if err != nil {
		return err
	}
	server := &http.Server{
		Addr: ":8443", Handler: handler(members, transport), ReadHeaderTimeout: 10 * time.Second,
		TLSConfig: &tls.Config{Certificates: []tls.Certificate{serving}, MinVersion: tls.VersionTLS12},
	}
	return server.ListenAndServeTLS("", "")
}

// frontProxy returns a transport with the certificate by which members trust the names of users.
func frontProxy(dir string) (http.RoundTripper, error) {
	pair, err := tls.LoadX509KeyPair(filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key"))
	if err != nil {
		return nil, fmt.Errorf("reading the certificate of the front proxy: %w", err)
	}
	ca, err := os.ReadFile(filepath.Join(dir, "ca.crt"))
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(ca) {
		return nil, errors.New("ca.crt has no certificate")
	}
	return &http.Transport{
		TLSClientConfig:   &tls.Config{RootCAs: pool, Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12},
		ForceAttemptHTTP2: true,
	}, nil
}

// selfSigned returns a serving certificate. The APIService does not verify it.
func selfSigned() (tls.Certificate, error) {
	crt, key, err := cert.GenerateSelfSignedCertKey("gateway", nil, nil)
	if err != nil {
		return tls.Certificate{}, err
	}
	return tls.X509KeyPair(crt, key)
}

// handler answers discovery, and passes on what is for members.
func handler(members map[string]*url.URL, to http.RoundTripper) http.Handler {
	mux := http.NewServeMux()
	version := "/apis/" + fleetv1.GatewayGroup + "/" + fleetv1.GatewayVersion
	mux.HandleFunc(version, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(metav1.APIResourceList{
			TypeMeta:     metav1.TypeMeta{Kind: "APIResourceList", APIVersion: "v1"},
			GroupVersion: fleetv1.GatewayGroup + "/" + fleetv1.GatewayVersion,
			APIResources: []metav1.APIResource{{Name: "clusters/proxy", Kind: "Cluster", Verbs: metav1.Verbs{"create", "delete", "get", "patch", "update"}}},
		})
	})
	mux.HandleFunc(version+"/clusters/{name}/proxy/{path...}", func(w http.ResponseWriter, r *http.Request) {
		member := members[r.PathValue("name")]
		if member == nil {
			http.Error(w, "no such cluster", http.StatusNotFound)
			return
		}
		proxy := &httputil.ReverseProxy{
			Transport: to, FlushInterval: -1, // a watch has an event at a time
			Rewrite: func(p *httputil.ProxyRequest) {
				p.Out.URL.Path, p.Out.URL.RawPath = "/"+r.PathValue("path"), ""
				p.Out.URL.Scheme, p.Out.URL.Host, p.Out.Host = member.Scheme, member.Host, ""
			},
		}
		proxy.ServeHTTP(w, r)
	})
	return mux
}
