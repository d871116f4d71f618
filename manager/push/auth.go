package push

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	authenticationv1client "k8s.io/client-go/kubernetes/typed/authentication/v1"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

// nodeClaim is the extra field of a TokenReview with the node that a token is bound to.
const nodeClaim = "authentication.kubernetes.io/node-name"

// Authenticator authenticates agents by their service-account tokens.
type Authenticator struct {
	Reviewer authenticationv1client.TokenReviewInterface
	// User is the agents' service account, as system:serviceaccount:NAMESPACE:NAME.
	User string
}

// errRefused means that the token is not valid for an agent. The reason is only logged;
// the caller does not receive it.
var errRefused = errors.New("refused")

// Node returns the node of the agent that the token belongs to.
func (a *Authenticator) Node(ctx context.Context, token string) (string, error) {
	review, err := a.Reviewer.Create(ctx, &authenticationv1.TokenReview{
		Spec: authenticationv1.TokenReviewSpec{Token: token, Audiences: []string{meshv1.Audience}},
	}, metav1.CreateOptions{})
	if err != nil {
		// The error could quote the request.
		return "", errors.New("the apiserver did not review the token")
	}
	s := review.Status
	switch {
	case !s.Authenticated:
		return "", fmt.Errorf("%w: the token is not valid for audience %s", errRefused, meshv1.Audience)
	case !slices.Contains(s.Audiences, meshv1.Audience):
		// An apiserver that does not know audiences answers without any.
		return "", fmt.Errorf("%w: the token was not reviewed for audience %s", errRefused, meshv1.Audience)
	case s.User.Username != a.User:
		return "", fmt.Errorf("%w: %s is not %s", errRefused, s.User.Username, a.User)
	}
	nodes := s.User.Extra[nodeClaim]
	if len(nodes) != 1 || nodes[0] == "" {
		return "", fmt.Errorf("%w: the token is not bound to a node", errRefused)
	}
	return nodes[0], nil
}

// bearer is the token of a call.
func bearer(ctx context.Context) (string, error) {
	md, _ := metadata.FromIncomingContext(ctx)
	if values := md.Get("authorization"); len(values) == 1 {
		if scheme, token, ok := strings.Cut(values[0], " "); ok && strings.EqualFold(scheme, "Bearer") && token != "" {
			return token, nil
		}
	}
	return "", status.Error(codes.Unauthenticated, "send one bearer token in the metadata authorization")
}

// reviewLimiter bounds the number of concurrent TokenReviews. Only a peer that exceeds its own
// bound is rejected: pods can reach the manager too, and one that sends invalid tokens must
// not block an agent.
type reviewLimiter struct {
	once  sync.Once
	slots chan struct{} // served in the order of arrival

	mu    sync.Mutex
	calls map[string]int // under way or waiting, by peer
}

func (l *reviewLimiter) enter(ctx context.Context) (leave func(), err error) {
	l.once.Do(func() {
		l.slots, l.calls = make(chan struct{}, maxReviews), map[string]int{}
	})
	who := address(ctx)
	l.mu.Lock()
	if l.calls[who] >= maxCallsPerPeer {
		l.mu.Unlock()
		return nil, status.Error(codes.ResourceExhausted, "too many calls at once from this address")
	}
	l.calls[who]++
	l.mu.Unlock()
	forget := func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		if l.calls[who]--; l.calls[who] == 0 {
			delete(l.calls, who)
		}
	}
	select {
	case l.slots <- struct{}{}:
		return func() { <-l.slots; forget() }, nil
	case <-ctx.Done():
		forget()
		return nil, ctx.Err()
	}
}

// address of the peer, without its port.
func address(ctx context.Context) string {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return ""
	}
	if ap, err := netip.ParseAddrPort(p.Addr.String()); err == nil {
		return ap.Addr().Unmap().WithZone("").String()
	}
	return p.Addr.String()
}
