package e2e

import (
	"context"
	"crypto/x509"
	"net"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

// An agent receives the policies of its own node's pods, and no other client receives any.
func TestAgentReceivesPoliciesOfItsNodeOnly(t *testing.T) {
	p := newPair(t)
	nodeA, nodeB := p.a.Spec.NodeName, p.b.Spec.NodeName
	if nodeA == nodeB {
		t.Skip("this needs two nodes")
	}
	agent := agentOn(t, nodeA)
	mesh := dialLeader(t, p.a.Pod)
	const audience = "ctrlmesh-manager"
	other := p.b.Pod
	good := token(t, agent.Namespace, agent.Spec.ServiceAccountName, agent, audience)

	for _, c := range []struct {
		what, token string
		refusal     codes.Code
	}{
		{"no token", "", codes.Unauthenticated},
		{"no token at all", "not-a-token", codes.Unauthenticated},
		{"another service account", token(t, other.Namespace, other.Spec.ServiceAccountName, other, audience), codes.Unauthenticated},
		{"another audience", token(t, agent.Namespace, agent.Spec.ServiceAccountName, agent, ""), codes.Unauthenticated},
		{"bound to no pod", token(t, agent.Namespace, agent.Spec.ServiceAccountName, nil, audience), codes.Unauthenticated},
	} {
		t.Run(c.what, func(t *testing.T) {
			policies, err := mesh.listen(t, c.token, nodeA)
			require.Equal(t, c.refusal, status.Code(err), "%v", err)
			require.Empty(t, policies)
			_, err = mesh.SignLeaf(bearer(t.Context(), c.token), &meshv1.SignLeafRequest{})
			require.Equal(t, c.refusal, status.Code(err), "%v", err)
		})
	}
	t.Run("another node", func(t *testing.T) {
		policies, err := mesh.listen(t, good, nodeB)
		require.Equal(t, codes.PermissionDenied, status.Code(err), "%v", err)
		require.Empty(t, policies)
	})
	t.Run("its own node", func(t *testing.T) {
		policies, err := mesh.listen(t, good, nodeA)
		require.NoError(t, err)
		require.Contains(t, policies, string(p.a.UID))
		require.NotContains(t, policies, string(p.b.UID))
		var pods corev1.PodList
		require.NoError(t, cluster.List(t.Context(), &pods))
		for _, pod := range pods.Items {
			if policy := policies[string(pod.UID)]; policy != nil {
				require.Equal(t, nodeA, pod.Spec.NodeName, "%s/%s", pod.Namespace, pod.Name)
			}
		}
	})
}

// leader is the manager that serves agents.
type leader struct{ meshv1.MeshClient }

// dialLeader connects to the leader from inside a pod, and verifies it as agents do.
func dialLeader(t *testing.T, pod *corev1.Pod) *leader {
	t.Helper()
	slice := &discoveryv1.EndpointSlice{}
	require.NoError(t, cluster.Get(t.Context(), client.ObjectKey{Namespace: kube.SystemNamespace, Name: "ctrlmesh-manager-leader"}, slice))
	address := net.JoinHostPort(slice.Endpoints[0].Addresses[0], strconv.Itoa(int(*slice.Ports[0].Port)))
	ca := &corev1.ConfigMap{}
	require.NoError(t, cluster.Get(t.Context(), client.ObjectKey{Namespace: kube.SystemNamespace, Name: "ctrlmesh-manager-ca"}, ca))
	roots := x509.NewCertPool()
	require.True(t, roots.AppendCertsFromPEM([]byte(ca.Data["ca.crt"])))
	conn, err := grpc.NewClient("passthrough:///"+address,
		grpc.WithTransportCredentials(credentials.NewClientTLSFromCert(roots, "ctrlmesh-manager."+kube.SystemNamespace+".svc")),
		grpc.WithContextDialer(func(ctx context.Context, address string) (net.Conn, error) {
			return cluster.DialFrom(ctx, pod, address)
		}))
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	return &leader{meshv1.NewMeshClient(conn)}
}

// listen sends a hello as the agent of a node, and returns the policies that it receives, by
// pod uid, until the sync is complete.
func (l *leader) listen(t *testing.T, token, node string) (map[string]*meshv1.PodPolicy, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	stream, err := l.Connect(bearer(ctx, token))
	if err != nil {
		return nil, err
	}
	// The answer shows whether this was received.
	_ = stream.Send(&meshv1.AgentMessage{Kind: &meshv1.AgentMessage_Hello{Hello: &meshv1.Hello{Node: node, AgentVersion: "e2e", Abilities: []string{meshv1.AbilityStandby}}}})
	policies := map[string]*meshv1.PodPolicy{}
	for {
		msg, err := stream.Recv()
		switch {
		case err != nil:
			return policies, err
		case msg.GetUpsert() != nil:
			policies[msg.GetUpsert().GetUid()] = msg.GetUpsert()
		case msg.GetSynced() != nil:
			return policies, nil
		}
	}
}

// bearer adds a token to each call, if there is one.
func bearer(ctx context.Context, token string) context.Context {
	if token == "" {
		return ctx
	}
	return metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+token)
}

// token requests a token of a service account, bound to a pod if one is given. Without an
// audience it is for the apiserver.
func token(t *testing.T, namespace, account string, pod *corev1.Pod, audience string) string {
	t.Helper()
	request := &authenticationv1.TokenRequest{}
	if audience != "" {
		request.Spec.Audiences = []string{audience}
	}
	if pod != nil {
		request.Spec.BoundObjectRef = &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Pod", Name: pod.Name, UID: pod.UID}
	}
	request, err := cluster.Clientset.CoreV1().ServiceAccounts(namespace).CreateToken(t.Context(), account, request, metav1.CreateOptions{})
	require.NoError(t, err)
	return request.Status.Token
}
