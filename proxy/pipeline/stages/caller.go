package stages

import (
	"encoding/base64"
	"encoding/json"
	"hash/maphash"
	"net/http"
	"net/url"
	"strings"
	"sync/atomic"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
	"github.com/ctrlmesh/ctrlmesh/proxy/pipeline"
	"github.com/ctrlmesh/ctrlmesh/proxy/status"
)

// certificateStage refuses clients that present a certificate: TLS ends in the proxy, so the
// certificate cannot reach the apiserver.
type certificateStage struct {
	passthrough bool
	notify      func(reason, format string, args ...any)
}

func newCertificateStage(p *Policy, _ match.Kind) pipeline.Stage {
	return certificateStage{p.Passthrough, p.env.Notify}
}

func (s certificateStage) Apply(x *pipeline.State) *pipeline.Outcome {
	if !x.Req.Certificate {
		return nil
	}
	if s.passthrough {
		return pipeline.RefusalFor(meshv1.RefusedPassthrough, status.Unavailable(1, "this connection is older than the passthrough of client certificates: connect again"))
	}
	const message = "TLS ends at the mesh, so a client certificate cannot reach the apiserver: use a token, " +
		"or set spec.clientCertificates: Passthrough on a configuration that divides nothing"
	x.Last = true
	s.notify(ReasonClientCertificate, "a client certificate was refused: %s", message)
	return pipeline.RefusalFor(meshv1.RefusedClientCertificate, unauthorized(message))
}

// contradictionStage refuses all requests of a pod whose configurations contradict each
// other. Clients retry 503, and not 403: the contradiction ends when the configuration is
// corrected.
type contradictionStage struct{ message string }

// newContradictionStage returns nil where the configurations agree.
func newContradictionStage(p *Policy, _ match.Kind) pipeline.Stage {
	if p.Refuse == "" {
		return nil
	}
	return contradictionStage{p.Refuse}
}

func (s contradictionStage) Apply(*pipeline.State) *pipeline.Outcome {
	return pipeline.RefusalFor(meshv1.RefusedContradiction, status.Unavailable(5, "%s", s.message))
}

// classifyStage refuses a request that cannot be classified.
type classifyStage struct{ clusters pipeline.ClusterPaths }

func newClassifyStage(p *Policy, _ match.Kind) pipeline.Stage { return classifyStage{p.clusters} }

func (s classifyStage) Apply(x *pipeline.State) *pipeline.Outcome {
	if x.Req.Classify(s.clusters); x.Req.Malformed != nil {
		return pipeline.RefusalFor(meshv1.RefusedMalformed, x.Req.Malformed)
	}
	return nil
}

// maxToken bounds a token, in bytes. Tokens of the apiserver have one or two thousand.
const maxToken = 64 << 10

// Tokens caches the hashes of Authorization headers that passed: no token is stored. A
// client sends the same one for most of an hour.
type Tokens [4]atomic.Uint64

func (t *Tokens) known(hash uint64) bool { return t[hash%uint64(len(t))].Load() == hash }

func (t *Tokens) remember(hash uint64) { t[hash%uint64(len(t))].Store(hash) }

// tokenStage refuses a request with a token that is bound to another pod, in every place
// where the apiserver reads tokens. A request without a token passes, unless the pod must
// send one.
type tokenStage struct {
	env      *Env
	shard    string
	required bool
}

// newTokenStage returns nil where any token is allowed.
func newTokenStage(p *Policy, _ match.Kind) pipeline.Stage {
	required := p.env.Info.RequireToken
	if p.Message.GetAnyToken() && !required {
		return nil
	}
	return &tokenStage{p.env, p.Shard, required}
}

func (s *tokenStage) Apply(x *pipeline.State) *pipeline.Outcome {
	if refused := s.check(x); refused != nil {
		return pipeline.RefusalFor(meshv1.RefusedToken, refused)
	}
	return nil
}

func (s *tokenStage) check(x *pipeline.State) *apierrors.StatusError {
	sent := false
	switch line, n := x.Req.Header.Count("Authorization"); n {
	case 0:
	case 1:
		hash := maphash.String(seed, line)
		if sent = s.env.Observations.Tokens.known(hash); sent {
			break
		}
		token, ok := bearer(line)
		if !ok {
			break
		}
		if refused := s.checkToken(token); refused != nil {
			return refused
		}
		sent = true
		s.env.Observations.Tokens.remember(hash)
	default:
		return unauthorized("more than one Authorization header")
	}
	for _, line := range x.Req.Header.Values("Sec-Websocket-Protocol") {
		for protocol := range strings.SplitSeq(line, ",") {
			encoded, ok := strings.CutPrefix(strings.TrimSpace(protocol), websocketBearer)
			if !ok {
				continue
			}
			token, err := base64.RawURLEncoding.DecodeString(encoded)
			if err != nil {
				return unauthorized("malformed bearer token")
			}
			if refused := s.checkToken(string(token)); refused != nil {
				return refused
			}
			sent = true
		}
	}
	if foreignInQuery(x.Req.Query, s.env.Info.UID) {
		return s.refuse()
	}
	if s.required && !sent {
		return unauthorized("pod %s is identified by its address, so each of its requests must have its own service account token", s.env.ID)
	}
	return nil
}

func (s *tokenStage) checkToken(token string) *apierrors.StatusError {
	switch v := judge(token, s.env.Info.UID); {
	case v == malformed:
		return unauthorized("malformed bearer token")
	case v == foreign, v == unbound && s.required:
		return s.refuse()
	}
	return nil
}

func (s *tokenStage) refuse() *apierrors.StatusError {
	p := s.env
	enforced := "no ShardingConfig selects the pod, so that none says spec.tokenBinding: Off"
	switch {
	case s.required:
		enforced = "spec.tokenBinding does not change this for a pod that is identified by its address"
	case s.shard != "":
		enforced = "spec.tokenBinding of ShardingConfig " + p.Info.Namespace + "/" + s.shard + " is Enforce"
	}
	why := status.New(http.StatusForbidden, metav1.StatusReasonForbidden, 0,
		"the token is not bound to pod %s, which sent the request: use the pod's own projected token (%s)", p.ID, enforced)
	p.Notify(ReasonToken, "a request was refused: %s", why.ErrStatus.Message)
	return why
}

func unauthorized(format string, args ...any) *apierrors.StatusError {
	return status.New(http.StatusUnauthorized, metav1.StatusReasonUnauthorized, 0, format, args...)
}

// websocketBearer is before the token in a subprotocol, for clients that cannot
// set a header.
const websocketBearer = "base64url.bearer.authorization.k8s.io."

// bearer reads an Authorization header as the apiserver does.
func bearer(header string) (token string, ok bool) {
	parts := strings.SplitN(strings.TrimSpace(header), " ", 3)
	if len(parts) < 2 || !strings.EqualFold(parts[0], "bearer") || parts[1] == "" {
		return "", false
	}
	return parts[1], true
}

// foreignInQuery reports whether the query has a token that is bound to another pod, where
// RFC 6750 allows one. kube-apiserver does not read it, but other servers of its API do,
// and so may applications behind a proxied service.
func foreignInQuery(query, uid string) bool {
	for pair := range strings.SplitSeq(query, "&") {
		key, value, _ := strings.Cut(pair, "=")
		if strings.ContainsAny(key, "%+") {
			key, _ = url.QueryUnescape(key)
		}
		if key != "access_token" {
			continue
		}
		if token, err := url.QueryUnescape(value); err == nil && judge(token, uid) == foreign {
			return true
		}
	}
	return false
}

var seed = maphash.MakeSeed()

// verdict is from which pod a token may be used.
type verdict int

const (
	unbound   verdict = iota // bound to no pod, or none of the apiserver's own
	own                      // bound to this pod
	foreign                  // bound to another
	malformed                // ambiguous, or too long
)

// judge reads a token as the apiserver does, except for the signature, which the apiserver
// verifies.
func judge(token, uid string) verdict {
	if len(token) > maxToken || strings.ContainsFunc(token, notInToken) {
		return malformed
	}
	parts := strings.SplitN(token, ".", 4) // no more: they could be thousands
	if len(parts) != 3 {
		return unbound
	}
	payload, err := base64.RawURLEncoding.DecodeString(parts[1])
	if err != nil {
		return unbound
	}
	var claims struct {
		Kubernetes struct {
			Pod struct {
				UID string `json:"uid"`
			} `json:"pod"`
		} `json:"kubernetes.io"`
	}
	// The apiserver issues no token without valid claims.
	_ = json.Unmarshal(payload, &claims)
	switch claims.Kubernetes.Pod.UID {
	case "":
		return unbound
	case uid:
		return own
	}
	return foreign
}

// notInToken reports whether a character is not in tokens. A JWT may also be a JSON object,
// in which unsigned claims could be beside the signed ones.
func notInToken(r rune) bool { return r <= ' ' || r >= 0x7f || r == '{' || r == '"' }
