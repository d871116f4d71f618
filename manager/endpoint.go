package manager

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// keepEndpoint points the agents' Service at this replica.
func (w *world) keepEndpoint(ctx context.Context) error {
	want, err := w.endpoint()
	if err != nil {
		return err
	}
	have := &discoveryv1.EndpointSlice{}
	err = w.live.Get(ctx, types.NamespacedName{Namespace: want.Namespace, Name: want.Name}, have)
	switch {
	case apierrors.IsNotFound(err):
		err = w.live.Create(ctx, want)
	case err == nil && have.AddressType != want.AddressType:
		// Immutable; a cluster changed its mind about its first family.
		if err = w.live.Delete(ctx, have); err == nil {
			err = w.live.Create(ctx, want)
		}
	case err == nil && !sameEndpoint(have, want):
		have.Labels, have.Endpoints, have.Ports = want.Labels, want.Endpoints, want.Ports
		err = w.live.Update(ctx, have)
	}
	if err != nil {
		return fmt.Errorf("EndpointSlice %s/%s: %w", want.Namespace, want.Name, err)
	}
	return nil
}

func sameEndpoint(a, b *discoveryv1.EndpointSlice) bool {
	same := equality.Semantic.DeepEqual
	return same(a.Endpoints, b.Endpoints) && same(a.Ports, b.Ports) && same(a.Labels, b.Labels)
}

func (w *world) endpoint() (*discoveryv1.EndpointSlice, error) {
	_, p, err := net.SplitHostPort(w.PushAddress)
	if err != nil {
		return nil, err
	}
	number, err := strconv.ParseUint(p, 10, 16)
	if err != nil {
		return nil, err
	}
	family := discoveryv1.AddressTypeIPv4
	if netip.MustParseAddr(w.PodIP).Unmap().Is6() {
		family = discoveryv1.AddressTypeIPv6
	}
	name, protocol, port, yes := "mesh", corev1.ProtocolTCP, int32(number), true
	e := discoveryv1.Endpoint{Addresses: []string{w.PodIP}, Conditions: discoveryv1.EndpointConditions{Ready: &yes}}
	if w.PodName != "" {
		e.TargetRef = &corev1.ObjectReference{Kind: "Pod", Namespace: w.Namespace, Name: w.PodName}
	}
	return &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: w.Namespace,
			Name:      w.ManagerService + "-leader",
			Labels: map[string]string{
				discoveryv1.LabelServiceName: w.ManagerService,
				discoveryv1.LabelManagedBy:   "ctrlmesh-manager",
			},
		},
		AddressType: family,
		Endpoints:   []discoveryv1.Endpoint{e},
		Ports:       []discoveryv1.EndpointPort{{Name: &name, Protocol: &protocol, Port: &port}},
	}, nil
}
