package stages

import (
	"bytes"
	"crypto/tls"
	"encoding/base64"
	"net/http"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
	"github.com/ctrlmesh/ctrlmesh/proxy/pipeline"
	"github.com/ctrlmesh/ctrlmesh/proxy/status"
)

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
	if key.Group != "" || key.Resource != "configmaps" || key.Subresource != "" {
		return nil
	}
	switch key.Verb {
	case "create", "update", "patch":
		return rootCAStage{p.env.Leaf}
	}
	return nil
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
