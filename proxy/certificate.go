package proxy

import (
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/status"
)

// certificateStage refuses clients that present a certificate: TLS ends in the proxy, so the
// certificate cannot reach the apiserver.
type certificateStage struct {
	passthrough bool
	notify      func(reason, format string, args ...any)
}

func (s certificateStage) apply(x *state) *outcome {
	if !x.req.certificate {
		return nil
	}
	if s.passthrough {
		return refusalBy(meshv1.RefusedPassthrough, status.Unavailable(1, "this connection is older than the passthrough of client certificates: connect again"))
	}
	const message = "TLS ends at the mesh, so a client certificate cannot reach the apiserver: use a token, " +
		"or set spec.clientCertificates: Passthrough on a configuration that divides nothing"
	x.last = true
	s.notify(ReasonClientCertificate, "a client certificate was refused: %s", message)
	return refusalBy(meshv1.RefusedClientCertificate, unauthorized(message))
}

// contradictionStage refuses all requests of a pod whose configurations contradict each
// other. Clients retry 503, and not 403: the contradiction ends when the configuration is
// corrected.
type contradictionStage struct{ message string }

func (s contradictionStage) apply(*state) *outcome {
	return refusalBy(meshv1.RefusedContradiction, status.Unavailable(5, "%s", s.message))
}
