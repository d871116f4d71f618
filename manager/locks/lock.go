package locks

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/internal/collect"
)

// resources are the kinds of objects that a lock may consist of, the Lease first.
var resources = []string{Leases, ConfigMaps, Endpoints}

var kinds = map[string]schema.GroupVersionKind{
	Leases:     coordinationv1.SchemeGroupVersion.WithKind("Lease"),
	ConfigMaps: corev1.SchemeGroupVersion.WithKind("ConfigMap"),
	Endpoints:  corev1.SchemeGroupVersion.WithKind("Endpoints"),
}

// contestedFor is how long a lock is not released after another client wrote it. That may have
// been another manager: then this one no longer leads, and is about to exit.
const contestedFor = 30 * time.Second

// provenAfter is how long the keeper renews a lock before it counts as acquired, if it found
// the lock in the mesh's name and not renewed within the lease's duration. The record may have
// been restored from a backup while a pod outside the mesh held the lock. That pod stops when
// it has failed to renew for its own deadline, which commonly is at most 107 s.
const provenAfter = 2 * leaseDuration

// Rounds may follow each other closely. Objects are not read again within readEvery, nor
// renewed within renewEvery.
const (
	readEvery  = 500 * time.Millisecond
	renewEvery = 3 * Every / 4
)

// lock is what the keeper knows of one lock.
type lock struct {
	types.NamespacedName
	objects map[string]*object // by resource
	// wanted are the resources of objects that are created if they do not exist.
	wanted []string
	// problem is why the lock could not be read in this round; nil if it was.
	problem error
	// permissions are those of configurations in other namespaces.
	permissions map[types.NamespacedName]*permission
	// winners are the configurations that share the lock, losers why others do not.
	winners []types.NamespacedName
	losers  map[types.NamespacedName]string
	// former are configurations that had the lock and do not demand it, while pods may act for them.
	former []types.NamespacedName
	// contested is when a write of the mesh last conflicted with another one.
	contested time.Time
}

// object is one of the objects of a lock, as it was last read.
type object struct {
	version // zero if it does not exist
	record
	isLock bool      // the object has a record
	since  time.Time // when the record was first seen as it is
	looked time.Time // when the object was read last
	wrote  time.Time // when the mesh wrote the record last
	// acquired is the time from which no pod can believe that it holds the lock; zero until the
	// mesh has written the record after this keeper read it.
	acquired time.Time
	stale    bool // the object must be read before it is written
}

func newLock(name types.NamespacedName) *lock {
	l := &lock{NamespacedName: name, objects: map[string]*object{}, permissions: map[types.NamespacedName]*permission{}}
	for _, resource := range resources {
		l.objects[resource] = &object{stale: true}
	}
	return l
}

// look reads the objects that may have changed. It skips those that the mesh holds: no other
// client writes them, and a renewal fails if one did.
func (l *lock) look(ctx context.Context, c client.Client, observed []string, now time.Time) {
	l.wanted = append([]string{Leases}, observed...)
	var errs []error
	for _, resource := range resources {
		o := l.objects[resource]
		optional := !slices.Contains(l.wanted, resource) && !o.isLock
		if !o.stale && (now.Sub(o.looked) < readEvery || o.isLock && o.ours() || optional && now.Sub(o.looked) < searchEvery) {
			continue
		}
		if err := o.read(ctx, c, resource, l.NamespacedName, now); err != nil {
			errs = append(errs, err)
		}
	}
	l.problem = errors.Join(errs...)
}

func (o *object) read(ctx context.Context, c client.Client, resource string, name types.NamespacedName, now time.Time) error {
	is := empty(resource, name)
	err := c.Get(ctx, name, is)
	if apierrors.IsNotFound(err) {
		*o = object{looked: now}
		return nil
	}
	if err != nil {
		return fmt.Errorf("reading %s %s: %w", resource, name, err)
	}
	return o.take(resource, is, now)
}

// take sets the object to what was read or written.
func (o *object) take(resource string, is client.Object, now time.Time) error {
	r, isLock, err := recordOf(resource, is)
	if err != nil {
		return err
	}
	next := object{version: versionOf(is), record: r, isLock: isLock, since: now, looked: now}
	// Only times of the keeper's own clock count, because clocks differ.
	if o.isLock && o.content == r.content && o.uid == next.uid {
		next.since = o.since
	}
	*o = next
	return nil
}

// empty returns an object, of which only the name is set, to read into. ConfigMaps and Endpoints
// may have other content, so only their metadata is read.
func empty(resource string, name types.NamespacedName) client.Object {
	if resource == Leases {
		u := &unstructured.Unstructured{}
		u.SetGroupVersionKind(kinds[resource])
		u.SetNamespace(name.Namespace)
		u.SetName(name.Name)
		return u
	}
	m := &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Namespace: name.Namespace, Name: name.Name}}
	m.SetGroupVersionKind(kinds[resource])
	return m
}

// held reports whether the mesh holds all objects of the lock.
func (l *lock) held() bool {
	return !collect.Any(l.objects, func(resource string, o *object) bool { return (resource == Leases || o.isLock) && !o.ours() })
}

// heldFor returns the configuration that the lock was acquired for. held reports whether the
// mesh holds some object of the lock.
func (l *lock) heldFor() (config types.NamespacedName, held bool) {
	for _, resource := range resources {
		if o := l.objects[resource]; o.isLock && o.ours() {
			namespace, name, _ := strings.Cut(o.heldFor(), "/")
			return types.NamespacedName{Namespace: namespace, Name: name}, true
		}
	}
	return types.NamespacedName{}, false
}

// proven reports whether no pod can believe that it holds a lock that the mesh holds.
func (o *object) proven(now time.Time) bool {
	return !o.acquired.IsZero() && !now.Before(o.acquired)
}

// sights returns what the decision about the lock depends on.
func (l *lock) sights(now time.Time) map[string]sight {
	out := map[string]sight{}
	for resource, o := range l.objects {
		if o.isLock || slices.Contains(l.wanted, resource) {
			out[resource] = sight{exists: o.isLock, record: o.record, age: now.Sub(o.since)}
		}
	}
	return out
}

func (l *lock) state(now time.Time) State {
	s := State{Held: l.held()}
	s.Acquired = s.Held
	for _, resource := range resources {
		o := l.objects[resource]
		if !o.isLock {
			continue
		}
		s.Acquired = s.Acquired && o.proven(now)
		if s.Renewed.IsZero() || o.wrote.Before(s.Renewed) {
			s.Renewed = o.wrote
		}
		s.Resources = append(s.Resources, resource)
		if is := (sight{true, o.record, now.Sub(o.since)}); s.Holder == "" && !o.ours() && !is.free() {
			s.Holder = o.holder
			if 2*is.age >= o.duration {
				s.Expires = o.since.Add(o.duration)
			}
		}
	}
	slices.Sort(s.Resources)
	if l.problem != nil && !s.Held {
		s.Problem = l.problem.Error()
	}
	return s
}

// do carries out a wish, and returns what it did, except renewals.
func (l *lock) do(ctx context.Context, c client.Client, w wish, now time.Time) (did []string) {
	if l.problem != nil {
		return nil
	}
	todo := steps(w.mode, l.sights(now))
	heldFor := w.config
	if before, held := l.heldFor(); held && w.mode != Keep {
		heldFor = before
	}
	var errs []error
	for _, resource := range resources {
		what, ok := todo[resource]
		if !ok || !l.may(what, resource, now) {
			continue
		}
		if what == release && !l.objects[resource].proven(now) {
			what = renew // another pod that acquires it now could lead beside the former holder
		}
		err := l.objects[resource].do(ctx, c, resource, l.NamespacedName, what, heldFor.String(), now)
		if apierrors.IsConflict(err) {
			l.contested = now
			break // the next round reads it
		}
		if err != nil {
			errs = append(errs, err)
			break // a lock is acquired in the order in which clients do
		}
		if said := done[what]; said != "" {
			did = append(did, said)
		}
	}
	l.problem = errors.Join(errs...)
	return did
}

// done are the log messages of actions. Renewals have none.
var done = map[action]string{
	acquire: "acquired a lock",
	release: "released a lock",
	unmark:  "removed the label from a lock that another holds",
}

// may reports whether an action may be carried out now.
func (l *lock) may(what action, resource string, now time.Time) bool {
	switch what {
	case renew:
		return now.Sub(l.objects[resource].wrote) >= renewEvery
	case release:
		return now.Sub(l.contested) >= contestedFor
	}
	return true
}

// do writes the record of an object. If another client has written it meanwhile, the next round
// reads it.
func (o *object) do(ctx context.Context, c client.Client, resource string, name types.NamespacedName, what action, heldFor string, now time.Time) error {
	target := empty(resource, name)
	if o.version == (version{}) {
		if err := create(ctx, c, resource, target); err != nil {
			o.stale = true
			return client.IgnoreAlreadyExists(err)
		}
		if err := o.take(resource, target, now); err != nil {
			return err
		}
	}
	patch, err := write(resource, o.version, o.record, what, heldFor, now)
	if err != nil {
		return err
	}
	written := empty(resource, name)
	err = c.Patch(ctx, written, client.RawPatch(types.MergePatchType, patch))
	if err != nil {
		o.stale = true // the write may have succeeded
		if apierrors.IsNotFound(err) {
			return nil
		}
		return fmt.Errorf("writing %s %s: %w", resource, name, err)
	}
	acquired, recent := o.acquired, o.recent(now)
	err = o.take(resource, written, now)
	o.wrote = now
	switch {
	case what == acquire:
		o.acquired = now
	case what == renew && acquired.IsZero() && recent:
		o.acquired = now
	case what == renew && acquired.IsZero():
		o.acquired = now.Add(provenAfter)
	case what == renew:
		o.acquired = acquired
	}
	return err
}

// create creates an empty lock, which any client may acquire.
func create(ctx context.Context, c client.Client, resource string, target client.Object) error {
	full := &unstructured.Unstructured{Object: map[string]any{}}
	full.SetGroupVersionKind(kinds[resource])
	full.SetNamespace(target.GetNamespace())
	full.SetName(target.GetName())
	if err := c.Create(ctx, full); err != nil {
		return fmt.Errorf("creating %s %s: %w", resource, client.ObjectKeyFromObject(target), err)
	}
	if u, ok := target.(*unstructured.Unstructured); ok {
		u.Object = full.Object
		return nil
	}
	target.SetUID(full.GetUID())
	target.SetResourceVersion(full.GetResourceVersion())
	return nil
}
