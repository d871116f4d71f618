package main

import (
	"context"
	"fmt"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"

	"github.com/ctrlmesh/ctrlmesh/tests/operators/sloppy/check"
)

// ClaimLabel marks the claims.
const ClaimLabel = check.ClaimLabel

// Bug is a bug of the operator.
type Bug string

const (
	// None: the operator is correct.
	None Bug = ""
	// StaleRead: the operator looks for a claim's child in a list that may be stale
	// (resourceVersion 0). Children have generated names, so the apiserver does not reject a
	// second child. Exposed by stale lists.
	StaleRead Bug = "stale-read"
	// LostEvent: the operator lists claims once, when it starts. Afterwards it relies on
	// receiving an event for every deletion. Exposed by dropped events.
	LostEvent Bug = "lost-event"
	// AssumedCreate: the operator records that a child was created without checking the
	// answer. Exposed by aborted creates.
	AssumedCreate Bug = "assumed-create"
)

type operator struct {
	maps typedcorev1.ConfigMapInterface
	bug  Bug
	// synced is true once claims were listed.
	synced bool
	// version is the resourceVersion of the last event.
	version string
}

func newOperator(maps typedcorev1.ConfigMapInterface, bug Bug) (*operator, error) {
	switch bug {
	case None, StaleRead, LostEvent, AssumedCreate:
		return &operator{maps: maps, bug: bug}, nil
	}
	return nil, fmt.Errorf("-bug=%s: no such bug: write %s, %s or %s", bug, StaleRead, LostEvent, AssumedCreate)
}

// resync creates the missing children of all claims, and deletes those of deleted claims.
func (o *operator) resync(ctx context.Context, claims []corev1.ConfigMap) error {
	if o.bug == LostEvent && o.synced {
		return nil // the bug: it relies on the watch alone
	}
	alive := map[string]bool{}
	for i := range claims {
		alive[claims[i].Name] = true
		if err := o.serve(ctx, &claims[i]); err != nil {
			return err
		}
	}
	children, err := o.maps.List(ctx, metav1.ListOptions{LabelSelector: check.ChildLabel})
	if err != nil {
		return fmt.Errorf("listing children: %w", err)
	}
	for _, c := range children.Items {
		if !alive[c.Labels[check.ChildLabel]] {
			if err := o.remove(ctx, c.Name); err != nil {
				return err
			}
		}
	}
	o.synced = true
	return nil
}

func (o *operator) event(ctx context.Context, kind watch.EventType, claim *corev1.ConfigMap) error {
	if kind != watch.Deleted {
		return o.serve(ctx, claim)
	}
	children, err := o.children(ctx, claim.Name, metav1.ListOptions{})
	if err != nil {
		return err
	}
	for _, c := range children {
		if err := o.remove(ctx, c.Name); err != nil {
			return err
		}
	}
	return nil
}

// serve ensures that a claim has its child and is marked as done.
func (o *operator) serve(ctx context.Context, claim *corev1.ConfigMap) error {
	child := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: claim.Name + "-child", Labels: map[string]string{check.ChildLabel: claim.Name}}}
	var err error
	switch {
	case claim.Annotations[check.DoneAnnotation] != "" && o.bug == AssumedCreate:
		return nil
	case o.bug == StaleRead:
		have, lerr := o.children(ctx, claim.Name, metav1.ListOptions{ResourceVersion: "0"})
		if lerr != nil {
			return lerr
		}
		if len(have) == 0 {
			// The claim's version: each change of the claim gives another name.
			child.Name += "-" + claim.ResourceVersion
			_, err = o.maps.Create(ctx, child, metav1.CreateOptions{})
		}
	default:
		_, err = o.maps.Create(ctx, child, metav1.CreateOptions{})
	}
	if err != nil && !apierrors.IsAlreadyExists(err) && o.bug != AssumedCreate {
		return fmt.Errorf("creating the child of %s: %w", claim.Name, err)
	}
	if claim.Annotations[check.DoneAnnotation] != "" {
		return nil
	}
	done := claim.DeepCopy()
	metav1.SetMetaDataAnnotation(&done.ObjectMeta, check.DoneAnnotation, strconv.FormatBool(true))
	if _, err := o.maps.Update(ctx, done, metav1.UpdateOptions{}); err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		return fmt.Errorf("recording that %s is done: %w", claim.Name, err)
	}
	return nil
}

func (o *operator) children(ctx context.Context, claim string, options metav1.ListOptions) ([]corev1.ConfigMap, error) {
	options.LabelSelector = check.ChildLabel + "=" + claim
	list, err := o.maps.List(ctx, options)
	if err != nil {
		return nil, fmt.Errorf("listing the children of %s: %w", claim, err)
	}
	return list.Items, nil
}

func (o *operator) remove(ctx context.Context, name string) error {
	if err := o.maps.Delete(ctx, name, metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("deleting %s: %w", name, err)
	}
	return nil
}
