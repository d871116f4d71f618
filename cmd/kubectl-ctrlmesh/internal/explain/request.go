package explain

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/proxy/pipeline"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/header"
)

// methods are the HTTP methods of the verbs.
var methods = map[string]string{
	"get": "GET", "list": "GET", "watch": "GET", "create": "POST", "update": "PUT", "patch": "PATCH", "delete": "DELETE", "deletecollection": "DELETE",
}

// Verbs are the verbs of requests for resources.
var Verbs = []string{"get", "list", "watch", "create", "update", "patch", "delete", "deletecollection"}

// unnamed is the name in the path of a request for an object that the user does not name.
const unnamed = "x-any-object"

// Request is a request that a pod would send.
type Request struct {
	Pod      types.NamespacedName
	Verb     string
	Resource Resource
	// Namespace of the object; empty for all namespaces, and for objects in none.
	Namespace string
	// Name of the object; empty for any that no rule names.
	Name string
	// Cluster is the member cluster that it goes to; empty: the apiserver's own.
	Cluster string
	// UserAgent of the client; empty: unknown.
	UserAgent string
	// UID of the object; empty if it does not exist. It is needed if the root has key: Object.
	UID types.UID
	// Unread is why the object cannot be read; nil if it was.
	Unread error

	// elects: the body has a leader-election record.
	elects bool
}

// Check returns what is wrong with a request; nil if nothing is.
func (q *Request) Check() error {
	switch {
	case !slices.Contains(Verbs, q.Verb):
		return fmt.Errorf("unknown verb %q: choose one of %s", q.Verb, strings.Join(Verbs, ", "))
	case q.Name != "" && q.Verb == "deletecollection":
		return errors.New("deletecollection names no object: leave out the name")
	case q.Resource.Namespaced && q.Namespace == "" && !slices.Contains([]string{"list", "watch"}, q.Verb):
		return fmt.Errorf("no apiserver serves %s in all namespaces: name one by --object-namespace", q.Verb)
	case q.Resource.Subresource != "" && slices.Contains([]string{"list", "watch", "deletecollection"}, q.Verb):
		return fmt.Errorf("%s is about one object: choose another verb than %s", q.Resource, q.Verb)
	case q.Name == "" && q.named() && q.Resource.isNamespaces():
		return errors.New("name the Namespace: each belongs to one shard")
	}
	return nil
}

// named reports whether the path of the request has the name of an object.
func (q *Request) named() bool {
	return q.Resource.Subresource != "" || !slices.Contains([]string{"list", "watch", "create", "deletecollection"}, q.Verb)
}

// writes reports whether the request changes something.
func (q *Request) writes() bool { return !slices.Contains([]string{"get", "list", "watch"}, q.Verb) }

// build returns the request as the pod would send it. clusters are the paths of member clusters.
func (q *Request) build(clusters []string) (pipeline.Request, error) {
	r := pipeline.Request{
		Ctx: context.Background(), Method: methods[q.Verb], Host: "kubernetes.default.svc", Proto: "HTTP/1.1",
		Header: header.Fields{{Name: "Accept", Value: "application/json"}},
	}
	if q.UserAgent != "" {
		r.Header.Set("User-Agent", q.UserAgent)
	}
	path, err := q.path(clusters)
	if err != nil {
		return r, err
	}
	r.Path, r.Escaped, r.Query = path, (&url.URL{Path: path}).EscapedPath(), q.query()
	r.Target = r.Escaped
	if r.Query != "" {
		r.Target += "?" + r.Query
	}
	body, contentType := q.body()
	if contentType != "" {
		r.Header.Set("Content-Type", contentType)
	}
	r.Length, r.Body.Rest = int64(len(body)), bytes.NewReader(body)
	return r, nil
}

// body returns a body that says nothing but what the request is about.
func (q *Request) body() (body []byte, contentType string) {
	switch q.Verb {
	case "patch":
		return []byte("{}"), "application/merge-patch+json"
	case "create", "update":
	default:
		return nil, ""
	}
	o := map[string]any{
		"apiVersion": q.Resource.apiVersion(), "kind": q.Resource.Kind,
		"metadata": map[string]string{"namespace": q.Namespace, "name": q.name()},
	}
	if q.elects {
		o["spec"] = map[string]any{
			"holderIdentity": q.Pod.Name, "leaseDurationSeconds": 15, "leaseTransitions": 0,
			"acquireTime": "2026-01-02T03:04:05.000000Z", "renewTime": "2026-01-02T03:04:05.000000Z",
		}
	}
	body, _ = json.Marshal(o) // strings and numbers always marshal
	return body, "application/json"
}

func (q *Request) path(clusters []string) (string, error) {
	parts := []string{"/apis", q.Resource.Group, q.Resource.Version}
	if q.Resource.Group == "" {
		parts = []string{"/api", q.Resource.Version}
	}
	if q.Namespace != "" {
		parts = append(parts, "namespaces", q.Namespace)
	}
	parts = append(parts, q.Resource.Name)
	if q.named() {
		parts = append(parts, q.name())
	}
	if q.Resource.Subresource != "" {
		parts = append(parts, q.Resource.Subresource)
	}
	path := strings.Join(parts, "/")
	if q.Cluster == "" {
		return path, nil
	}
	if len(clusters) == 0 {
		return "", errors.New("the pod's ShardingConfig has no spec.clusters, so that no request leads to a member cluster: leave out --cluster")
	}
	return strings.Replace(clusters[0], "*", q.Cluster, 1) + path, nil
}

func (q *Request) query() string {
	values := url.Values{}
	if q.Verb == "watch" {
		values.Set("watch", "true")
	}
	if q.Name != "" && (q.Verb == "list" || q.Verb == "watch") {
		values.Set("fieldSelector", "metadata.name="+q.Name)
	}
	return values.Encode()
}

func (q *Request) name() string {
	return cmp.Or(q.Name, unnamed)
}
