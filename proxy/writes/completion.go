package writes

import (
	"errors"
	"mime"
	"net/http"
	"time"

	"k8s.io/apimachinery/pkg/util/sets"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/upstream"
)

// Completion is what is known of the end of a write at the apiserver.
type Completion int

const (
	// NotSeen means that the write may go on until the apiserver's request timeout.
	NotSeen Completion = iota
	// Dropped means that the apiserver does nothing more for it, but etcd may.
	Dropped
	// Ended means that the write has taken effect, or never will.
	Ended
)

// Left returns how long a write may still take effect.
func (c Completion) Left(unseen time.Duration) time.Duration {
	switch c {
	case Ended:
		return 0
	case Dropped:
		return meshv1.LostWrite
	}
	return unseen
}

// builtIn are the API groups that kube-apiserver serves itself. It proxies other
// groups to extension servers, or keeps them as custom resources: a request does not
// show which.
var builtIn = sets.New(
	"", "apps", "autoscaling", "batch", "extensions", "policy",
	"admissionregistration.k8s.io", "apiextensions.k8s.io", "apiregistration.k8s.io",
	"authentication.k8s.io", "authorization.k8s.io", "certificates.k8s.io",
	"coordination.k8s.io", "discovery.k8s.io", "events.k8s.io",
	"flowcontrol.apiserver.k8s.io", "internal.apiserver.k8s.io", "networking.k8s.io",
	"node.k8s.io", "rbac.authorization.k8s.io", "resource.k8s.io",
	"scheduling.k8s.io", "storage.k8s.io", "storagemigration.k8s.io",
)

// Complete decides about a write by its response, or by the error instead of one. The apiserver
// sees our end of a connection only once it has ended its own. sent means that some of the
// write was sent, awaited that it was awaited for as long as it may go on.
func Complete(k match.Kind, sent, awaited bool, resp *upstream.Response, err error) Completion {
	direct := !k.Connects() && !k.MemberCluster // else there are other servers behind the apiserver
	if err == nil {
		switch {
		case resp.Status < http.StatusInternalServerError:
			return Ended
		case builtIn.Has(k.Group) && direct && fromAPIServer(resp.Get("Content-Type")):
			return Dropped
		}
		return NotSeen
	}
	_, cutShort := errors.AsType[*upstream.BodyError](err)
	switch {
	case !sent:
		return Ended
	case cutShort && direct: // the apiserver does nothing without the last byte
		return Dropped
	case upstream.Ended(err), awaited:
		return Dropped
	}
	return NotSeen
}

// fromAPIServer reports whether an error was encoded by an API server. Proxies in between,
// the apiserver's own aggregation layer included, answer in plain text.
func fromAPIServer(contentType string) bool {
	mediaType, _, err := mime.ParseMediaType(contentType)
	return err == nil && (mediaType == "application/json" || mediaType == "application/vnd.kubernetes.protobuf")
}
