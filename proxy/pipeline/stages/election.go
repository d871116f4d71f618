package stages

import (
	"bytes"
	"cmp"
	"crypto/tls"
	"encoding/base64"
	"io"
	"net/http"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/lock"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
	"github.com/ctrlmesh/ctrlmesh/proxy/pipeline"
	"github.com/ctrlmesh/ctrlmesh/proxy/status"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/upstream"
)

const (
	// unknownRetry is the Retry-After of a write of a lock that no policy names, in
	// seconds. By then the policy may name it.
	unknownRetry = 1
	// heartbeats is the namespace of the Leases of nodes.
	heartbeats = "kube-node-lease"
)

// electionStage looks for leader-election records in a member's writes of Leases,
// ConfigMaps and Endpoints. It refuses a record of a lock that the policy does not name:
// the shards would contend for the lock, and only one would work.
type electionStage struct {
	policy   *Policy
	resource string
	suffix   string // of the shard's own locks
	// withheld, if not empty: the record is not refused. Without the dry run the lock would
	// be renamed once it is discovered.
	withheld withheld
}

// newElectionStage returns nil where a request writes no lock.
func newElectionStage(p *Policy, key match.Kind) pipeline.Stage {
	s := p.Message.GetSharding()
	if s == nil || !mayLock(key) {
		return nil
	}
	switch key.Verb {
	case "create", "update", "patch":
		out := &electionStage{policy: p, resource: strings.Clone(key.Resource), suffix: "---" + p.Shard}
		if s.GetDryRun() {
			out.withheld = p.withheldAction(key.Verb, wouldRename)
		}
		return out
	case "get":
		if key.Resource == "leases" {
			return pollStage{p}
		}
	}
	return nil
}

func (s *electionStage) Apply(x *pipeline.State) *pipeline.Outcome {
	// A lock that the policy names is exempt. Heartbeats of nodes are no locks.
	if x.Exempt || x.Req.Info.Namespace == "" || x.Req.Info.Namespace == heartbeats {
		return nil
	}
	body, whole := x.Peek()
	if !whole {
		return nil
	}
	contentType := x.Out.Header.Get("Content-Type")
	if refused := x.Memory.Hold(lock.Weight(contentType, body)); refused != nil {
		return pipeline.Refusal(refused)
	}
	record, ok, err := lock.FindRecord(s.resource, contentType, body)
	if err != nil {
		return pipeline.Refusal(status.UnsupportedMediaType("whether %s %s/%s is a leader-election lock must be read: %v", s.resource, x.Req.Info.Namespace, x.Req.Info.Name, err))
	}
	name := cmp.Or(x.Req.Info.Name, record.Name)
	if !ok || name == "" || !match.Storable(x.Req.Info.Namespace, name) || strings.HasSuffix(name, s.suffix) || s.policy.excludesLock(x.Req.Info.Namespace, name) {
		return nil
	}
	s.policy.env.Observations.Observed.Note(lock.Observed{Namespace: x.Req.Info.Namespace, Name: name, Resource: s.resource, Written: true}, time.Now())
	if s.withheld != "" {
		s.withheld.note(x)
		x.Exempt = true
		return nil
	}
	return pipeline.RefusalFor(meshv1.RefusedUnknownLock, status.Unavailable(unknownRetry, "%s %s/%s is a leader-election lock that ShardingConfig %s/%s does not manage: if it is not discovered within a minute, name it in spec.controller.locks, or, if it does not elect the operator's leader, in spec.controller.excludedLocks",
		s.resource, x.Req.Info.Namespace, name, s.policy.env.Info.Namespace, s.policy.Shard))
}

// excludesLock reports whether the policy says that an object is not a lock of the operator.
func (p *Policy) excludesLock(namespace, name string) bool {
	return slices.ContainsFunc(p.Message.GetSharding().GetExcludedLocks(), func(e *meshv1.ExcludedLock) bool {
		prefix, isPrefix := strings.CutSuffix(e.GetName(), "*")
		return e.GetNamespace() == namespace && (e.GetName() == name || isPrefix && strings.HasPrefix(name, prefix))
	})
}

// pollStage looks for leader-election records in the Leases that a member reads by name: a
// member that waits for a lock does not write it.
type pollStage struct{ policy *Policy }

func (s pollStage) Apply(x *pipeline.State) *pipeline.Outcome {
	if !x.Exempt && x.Req.Info.Namespace != "" && x.Req.Info.Namespace != heartbeats && len(x.Req.Info.Parts) == 2 && !s.policy.excludesLock(x.Req.Info.Namespace, x.Req.Info.Name) {
		x.Responses.Add(s)
	}
	return nil
}

// Respond reads the response to a poll, and passes it on unchanged.
func (s pollStage) Respond(x *pipeline.State, resp *upstream.Response) *pipeline.Outcome {
	if resp.Status != http.StatusOK {
		return nil
	}
	buf := upstream.Buffer()
	defer buf.Free()
	n, err := pipeline.Fill(resp.Body, buf.B)
	body := append(make([]byte, 0, n), buf.B[:n]...)
	rest := io.Reader(resp.Body)
	if err != nil {
		rest = failing{err}
	}
	resp.Wrap(io.MultiReader(bytes.NewReader(body), rest))
	if err != io.EOF || resp.Get("Content-Encoding") != "" { //nolint:errorlint // a wrapped one is a body cut short
		return nil
	}
	record, ok, _ := lock.FindRecord("leases", resp.Get("Content-Type"), body) // an answer is not YAML
	if !ok || s.policy.env.identifiesAs(record.Holder) || !match.Storable(x.Req.Info.Namespace, x.Req.Info.Name) || strings.HasSuffix(x.Req.Info.Name, "---"+s.policy.Shard) {
		return nil
	}
	s.policy.env.Observations.Observed.Note(lock.Observed{Namespace: x.Req.Info.Namespace, Name: x.Req.Info.Name, Resource: "leases", Holder: record.Holder}, time.Now())
	return nil
}

// failing is the end of a body.
type failing struct{ err error }

func (f failing) Read([]byte) (int, error) { return 0, f.err }

// rootCAs is the ConfigMap in every namespace with the CA of the API server.
const rootCAs = "kube-root-ca.crt"

// rootCAStage refuses to write the mesh's CA into rootCAs: pods outside the mesh would no
// longer verify the API server. Members find that CA in their own volumes, so one that
// publishes the cluster's CA, such as kube-controller-manager, would publish the mesh's.
type rootCAStage struct {
	leaf func() (*tls.Certificate, error)
}

// newRootCAStage returns nil where a request writes no ConfigMap.
func newRootCAStage(p *Policy, key match.Kind) pipeline.Stage {
	written := slices.Contains([]string{"create", "update", "patch"}, key.Verb)
	if key.Group != "" || key.Resource != "configmaps" || key.Subresource != "" || !written {
		return nil
	}
	return rootCAStage{p.env.Leaf}
}

func (s rootCAStage) Apply(x *pipeline.State) *pipeline.Outcome {
	if x.Req.Info.Name != rootCAs && x.Req.Info.Name != "" {
		return nil
	}
	body, whole := x.Peek()
	if !whole || x.Req.Info.Name == "" && !bytes.Contains(body, []byte(rootCAs)) {
		return nil
	}
	leaf, err := s.leaf()
	if err != nil || !containsPEM(body, leaf.Certificate[len(leaf.Certificate)-1]) {
		return nil
	}
	return pipeline.RefusalFor(meshv1.RefusedMeshCA, status.New(http.StatusForbidden, metav1.StatusReasonForbidden, 0,
		"configmaps %s/%s would get the CA of the mesh, by which pods outside the mesh cannot verify the API server: give the operator the cluster's own CA, for kube-controller-manager with --root-ca-file, or turn off the controller that publishes it",
		x.Req.Info.Namespace, rootCAs))
}

// containsPEM reports whether a text contains a certificate, by the lines of its PEM form,
// which no encoding of an object changes.
func containsPEM(text, der []byte) bool {
	const bytesPerLine = 48
	for line := range slices.Chunk(der, bytesPerLine) {
		if !bytes.Contains(text, []byte(base64.StdEncoding.EncodeToString(line))) {
			return false
		}
	}
	return true
}
