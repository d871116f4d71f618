// Package stamp labels the objects of method Labels: new ones at admission, others by a sweep.
package stamp

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/controllers"
	"github.com/ctrlmesh/ctrlmesh/manager/label"
)

// Controller maintains what is stamped at admission: by a MutatingAdmissionPolicy if the
// administrator has installed it, else by a webhook.
type Controller struct {
	Client client.Client
	// Service of the stamping webhook. CA returns the bundle that verifies it.
	Service    types.NamespacedName
	CA         func() []byte
	State      *controllers.State
	Namespaces *label.Namespaces
	Sweeper    *label.Sweeper
	Now        func() time.Time
}

// Spec implements controllers.Reconciler.
func (r *Controller) Spec() controllers.Spec {
	return controllers.Spec{
		Name: "stamp", Reconcile: r.Reconcile, Debounce: controllers.DebounceEvents, Resync: time.Minute,
		On: []controllers.Source{&r.State.Settings, r.State.Listed.When(otherNamespaces), r.State.Compiled.When(otherConfigs)},
	}
}

// Reconcile writes what is stamped and then starts the sweep, so that objects that are created
// during the sweep are already labelled.
func (r *Controller) Reconcile(ctx context.Context) error {
	c := r.State.Compiled.Load()
	if c == nil {
		return nil
	}
	err := r.admission(ctx, label.Listed(c.Configs...))
	// Even without admission the sweep labels what exists.
	r.Sweeper.Set(c.Configs)
	return err
}

func (r *Controller) admission(ctx context.Context, groups []v1alpha1.ResourceGroup) error {
	stamped, err := r.stamped(groups)
	if err != nil {
		return err
	}
	since, err := controllers.PolicySince(ctx, r.Client, label.Configuration)
	if err != nil {
		return err
	}
	if since.IsZero() {
		return r.write(ctx, len(stamped) > 0, func(c *admissionv1.MutatingWebhookConfiguration) {
			delete(c.Annotations, v1alpha1.StampedAnnotation)
			service := label.Service{Namespace: r.Service.Namespace, Name: r.Service.Name, CA: r.CA()}
			c.Webhooks = label.Webhooks(stamped, service, r.State.Settings.Load())
		})
	}
	unlabelled := r.labelNamespaces(ctx, len(stamped) > 0)
	return errors.Join(unlabelled, r.write(ctx, len(stamped) > 0, func(c *admissionv1.MutatingWebhookConfiguration) {
		c.Annotations = annotated(c.Annotations, stamped)
		if unlabelled == nil && r.Now().Sub(since) >= controllers.PolicyDelay {
			c.Webhooks = nil
		}
	}))
}

// maxStamped bounds the names of the resources that are stamped at admission, in bytes: an
// annotation has them, and annotations may have 256 KiB together.
const maxStamped = 128 << 10

// stamped returns the resources that are stamped at admission. Those that are not served yet have
// no place among too many: anybody who may write a configuration can invent some.
func (r *Controller) stamped(groups []v1alpha1.ResourceGroup) ([]schema.GroupResource, error) {
	settings := r.State.Settings.Load()
	named := label.Stamped(groups, nil, settings)
	many := len(joined(named)) > maxStamped
	if !many && !label.Wild(groups) {
		return named, nil
	}
	served, err := r.Sweeper.Served()
	if len(served) == 0 { // else some groups do not answer
		return nil, fmt.Errorf("listing the resources that the apiserver serves: %w", err)
	}
	all := label.Stamped(groups, served, settings)
	if many {
		return label.Served(all, served), nil
	}
	return all, nil
}

func joined(resources []schema.GroupResource) string {
	return strings.Join(collect.Map(resources, schema.GroupResource.String), ",")
}

// labelNamespaces labels the namespaces if anything is stamped. What was created in them before
// is labelled by the sweep.
func (r *Controller) labelNamespaces(ctx context.Context, stamps bool) error {
	if !stamps {
		return nil
	}
	labelled, err := r.Namespaces.Set(ctx, v1alpha1.ShardingHashLabel, label.Bucket(r.Service.Namespace, r.State.Settings.Load()))
	r.Sweeper.Visit(labelled...)
	return err
}

// annotated returns annotations by which the policy stamps resources.
func annotated(annotations map[string]string, stamped []schema.GroupResource) map[string]string {
	out := maps.Clone(annotations)
	if len(stamped) == 0 {
		delete(out, v1alpha1.StampedAnnotation)
		return out
	}
	if out == nil {
		out = map[string]string{}
	}
	out[v1alpha1.StampedAnnotation] = joined(stamped)
	return out
}

// write changes the webhook configuration, which may be missing if it is not needed.
func (r *Controller) write(ctx context.Context, needed bool, change func(*admissionv1.MutatingWebhookConfiguration)) error {
	_, err := controllers.ChangeWebhooks(ctx, r.Client, label.Configuration, "new objects are not labelled", change)
	if apierrors.IsNotFound(err) && !needed {
		return nil
	}
	return err
}

// otherConfigs reports whether a configuration has changed: the controller reads the apiserver,
// so it does not run at every step of every pod.
func otherConfigs(before, after *controllers.Compiled) bool {
	return before == nil || !slices.EqualFunc(before.Configs, after.Configs, compile.SameSpec)
}

// otherNamespaces reports whether a namespace was created or deleted.
func otherNamespaces(before, after *controllers.Listed) bool {
	return before != nil && !slices.Equal(before.Namespaces, after.Namespaces)
}
