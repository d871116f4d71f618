// Package endpoint publishes the address of the leader to agents.
package endpoint

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"github.com/ctrlmesh/ctrlmesh/internal/failure"
	"github.com/ctrlmesh/ctrlmesh/manager/controllers"
)

// Controller points the agents' Service, which has no selector, at this replica.
type Controller struct {
	Client client.Client
	// Namespace and Service are those of the manager.
	Namespace, Service string
	// PodName and PodIP are this replica's; PodName may be empty.
	PodName, PodIP string
	// Address is where agents are served.
	Address string
}

// Spec implements controllers.Reconciler.
func (c *Controller) Spec() controllers.Spec {
	return controllers.Spec{Name: "endpoint", Reconcile: c.Reconcile, Resync: 15 * time.Second}
}

// Reconcile writes the Service's EndpointSlice.
func (c *Controller) Reconcile(ctx context.Context) error {
	want, err := c.endpoint()
	if err != nil {
		return err
	}
	have := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: want.Namespace, Name: want.Name}}
	_, err = controllerutil.CreateOrUpdate(ctx, c.Client, have, func() error {
		if have.AddressType != "" && have.AddressType != want.AddressType {
			return errFamily
		}
		have.AddressType, have.Labels, have.Endpoints, have.Ports = want.AddressType, want.Labels, want.Endpoints, want.Ports
		return nil
	})
	if errors.Is(err, errFamily) {
		if err = c.Client.Delete(ctx, have); err == nil {
			err = c.Client.Create(ctx, want)
		}
	}
	return failure.Wrap(err, "writing EndpointSlice %s/%s", want.Namespace, want.Name)
}

// errFamily means that the cluster has another first IP family than before, which the
// EndpointSlice cannot change to.
var errFamily = errors.New("the EndpointSlice is of another IP family")

// endpoint returns the EndpointSlice as it should be.
func (c *Controller) endpoint() (*discoveryv1.EndpointSlice, error) {
	_, p, err := net.SplitHostPort(c.Address)
	if err != nil {
		return nil, err
	}
	number, err := strconv.ParseUint(p, 10, 16)
	if err != nil {
		return nil, err
	}
	family := discoveryv1.AddressTypeIPv4
	if netip.MustParseAddr(c.PodIP).Unmap().Is6() {
		family = discoveryv1.AddressTypeIPv6
	}
	name, protocol, port, yes := "mesh", corev1.ProtocolTCP, int32(number), true
	e := discoveryv1.Endpoint{Addresses: []string{c.PodIP}, Conditions: discoveryv1.EndpointConditions{Ready: &yes}}
	if c.PodName != "" {
		e.TargetRef = &corev1.ObjectReference{Kind: "Pod", Namespace: c.Namespace, Name: c.PodName}
	}
	return &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: c.Namespace,
			Name:      c.Service + "-leader",
			Labels: map[string]string{
				discoveryv1.LabelServiceName: c.Service,
				discoveryv1.LabelManagedBy:   "ctrlmesh-manager",
			},
		},
		AddressType: family,
		Endpoints:   []discoveryv1.Endpoint{e},
		Ports:       []discoveryv1.EndpointPort{{Name: &name, Protocol: &protocol, Port: &port}},
	}, nil
}
