package apiserver

import (
	"context"
	"errors"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

// Read returns what agents must know of the apiserver and of each other. namespace is the
// mesh's; ca verifies the apiserver, meshCA the agents.
func Read(ctx context.Context, from client.Reader, namespace string, ca, meshCA []byte) (*meshv1.Cluster, error) {
	var service corev1.Service
	var parts discoveryv1.EndpointSliceList
	agents := &corev1.Service{}
	err := from.Get(ctx, types.NamespacedName{Namespace: namespace, Name: AgentService}, agents)
	if apierrors.IsNotFound(err) {
		agents, err = nil, nil // no pod is captured by address then
	}
	if err = errors.Join(err,
		from.Get(ctx, types.NamespacedName{Namespace: Namespace, Name: Name}, &service),
		from.List(ctx, &parts, client.InNamespace(Namespace), client.MatchingLabels{discoveryv1.LabelServiceName: Name}),
	); err != nil {
		return nil, err
	}
	return Cluster(&service, agents, parts.Items, ca, meshCA)
}
