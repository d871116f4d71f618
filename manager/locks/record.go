package locks

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"strings"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/election"
	"github.com/ctrlmesh/ctrlmesh/internal/failure"
	"github.com/ctrlmesh/ctrlmesh/internal/parallel"
)

// Resources that a lock may consist of.
const (
	Leases     = "leases"
	ConfigMaps = "configmaps"
	Endpoints  = "endpoints"
)

const (
	// leaseDuration is the lease duration of locks that the mesh holds. Clients that find the
	// record unchanged for that long try to acquire the lock, which fails.
	leaseDuration = time.Minute
	// maxRecord bounds a record in bytes, because the keeper stores those of all locks. Clients
	// write less than 1 KiB.
	maxRecord = 8 << 10
	// maxHeld bounds one that the mesh has written: to write it in other words makes it six times as
	// long at most.
	maxHeld = 8 * maxRecord
	// clockSkew bounds by how much the clock of another manager may be ahead.
	clockSkew = 5 * time.Second
	// defaultDuration applies to records without a lease duration.
	defaultDuration = 15 * time.Second
)

// version is that of an object which was read.
type version struct {
	uid      types.UID
	resource string // the resourceVersion
}

func versionOf(o client.Object) version { return version{o.GetUID(), o.GetResourceVersion()} }

// record is a leader-election record.
type record struct {
	holder      string
	duration    time.Duration
	transitions int64
	// renewed is when the holder last renewed the record, by its clock; zero if unknown.
	renewed time.Time
	// content changes with every renewal.
	content string
	// marked reports whether the object has the mesh's label.
	marked bool
}

// ours reports whether the mesh holds the lock, and the label protects it.
func (r record) ours() bool { return r.marked && r.identified() }

// identified reports whether the holder is the mesh by its identity. If the label is
// missing, an administrator removed it to release the lock.
func (r record) identified() bool { return strings.HasPrefix(r.holder, v1alpha1.LockIdentityPrefix) }

// heldFor returns the configuration that the mesh holds the lock for.
func (r record) heldFor() string { return strings.TrimPrefix(r.holder, v1alpha1.LockIdentityPrefix) }

// lockSpec are the fields of a Lease that make up the record.
type lockSpec struct {
	HolderIdentity       string           `json:"holderIdentity"`
	LeaseDurationSeconds election.Seconds `json:"leaseDurationSeconds"`
	RenewTime            string           `json:"renewTime"`
	LeaseTransitions     int64            `json:"leaseTransitions"`
	LeaderTransitions    int64            `json:"leaderTransitions"`
}

// recordOf returns the record of an object. It is not ok if the object has none, such as a
// ConfigMap that is no lock.
func recordOf(resource string, o client.Object) (r record, ok bool, err error) {
	content, ok, err := contentOf(resource, o)
	if err != nil {
		return record{}, false, fmt.Errorf("reading the record: %w", err)
	}
	if ok {
		r, err = parse(content)
	} else {
		r, ok = forLife(o)
	}
	r.marked = o.GetLabels()[v1alpha1.LockHeldLabel] == "true"
	bound := maxRecord
	if r.ours() {
		bound = maxHeld
	}
	switch size := len(r.holder) + len(r.content); {
	case err != nil && resource == Leases: // a broken annotation is an empty record, as for clients
		return record{}, false, fmt.Errorf("reading the record: %w", err)
	case size > bound:
		return record{}, false, fmt.Errorf("the record has %d bytes, more than %d, so it is not of a client: correct it, or delete the object", size, bound)
	}
	return r, ok, nil
}

// contentOf returns the text of an object's record.
func contentOf(resource string, o client.Object) (content []byte, ok bool, err error) {
	if resource != Leases {
		text, has := o.GetAnnotations()[resourcelock.LeaderElectionRecordAnnotationKey]
		return []byte(text), has, nil
	}
	u, isUnstructured := o.(*unstructured.Unstructured)
	if !isUnstructured {
		return nil, false, fmt.Errorf("an object of %T", o)
	}
	content, err = json.Marshal(u.Object["spec"])
	return content, true, err
}

func parse(content []byte) (record, error) {
	var spec lockSpec
	err := json.Unmarshal(content, &spec)
	r := record{
		holder:      spec.HolderIdentity,
		duration:    time.Duration(spec.LeaseDurationSeconds) * time.Second,
		transitions: max(spec.LeaseTransitions, spec.LeaderTransitions),
		content:     string(content),
	}
	if at, err := time.Parse(time.RFC3339Nano, spec.RenewTime); err == nil {
		r.renewed = at
	}
	if r.duration <= 0 {
		r.duration = defaultDuration
	}
	return r, err
}

// forLife returns the record of a leader for life: a ConfigMap without a record that a pod owns.
// It is deleted with that pod, and until then no other leads.
func forLife(o client.Object) (r record, ok bool) {
	for _, owner := range o.GetOwnerReferences() {
		if owner.APIVersion == "v1" && owner.Kind == "Pod" {
			return record{holder: owner.Name, duration: math.MaxInt64, content: string(owner.UID)}, true
		}
	}
	return record{}, false
}

// LongestLease returns for how long the holders of locks may believe that they hold them after
// their last renewal; 0 if nobody holds one. It reads the locks together: shards may have thousands.
func LongestLease(ctx context.Context, c client.Reader, names []types.NamespacedName) (longest time.Duration, err error) {
	var mu sync.Mutex
	errs := parallel.Each(names, atOnce, func(name types.NamespacedName) error {
		lease, err := leaseOf(ctx, c, name)
		mu.Lock()
		defer mu.Unlock()
		longest = max(longest, lease)
		return err
	})
	return longest, cmp.Or(errs...)
}

// leaseOf is LongestLease of one lock.
func leaseOf(ctx context.Context, c client.Reader, name types.NamespacedName) (longest time.Duration, err error) {
	for _, resource := range resources {
		o := empty(resource, name)
		switch err := c.Get(ctx, name, o); {
		case apierrors.IsNotFound(err):
			continue
		case err != nil:
			return 0, fmt.Errorf("reading the lease of %s %s: %w", resource, name, err)
		}
		r, isLock, err := recordOf(resource, o)
		if err != nil {
			return 0, fmt.Errorf("reading the lease of %s %s: %w", resource, name, err)
		}
		if isLock && r.holder != "" {
			longest = max(longest, r.duration)
		}
	}
	return longest, nil
}

// action is a change of a record.
type action int

const (
	acquire action = iota
	renew
	release
	// unmark removes the label from an object that another client holds. A mesh that was removed
	// left it, and it would keep the holder from renewing.
	unmark
)

// write returns the merge patch for an action on an object as it was read. The patch fails if the
// object has changed since. It keeps unknown fields.
func write(resource string, is version, before record, do action, heldFor string, now time.Time) ([]byte, error) {
	meta := map[string]any{"resourceVersion": is.resource, "uid": is.uid}
	annotations := map[string]any{}
	switch do {
	case acquire:
		meta["labels"] = map[string]any{v1alpha1.LockHeldLabel: "true"}
		annotations[v1alpha1.LockHolderAnnotation] = heldFor
	case release, unmark:
		meta["labels"] = map[string]any{v1alpha1.LockHeldLabel: nil}
		annotations[v1alpha1.LockHolderAnnotation] = nil
	case renew: // another configuration may share the lock by now
		annotations[v1alpha1.LockHolderAnnotation] = heldFor
	}
	patch := map[string]any{"metadata": meta}
	fields := recordFields(resource, before, do, heldFor, now)
	switch {
	case do == unmark:
	case resource == Leases:
		patch["spec"] = fields
	default:
		text, err := annotated(before.content, fields)
		if err != nil {
			return nil, err
		}
		annotations[resourcelock.LeaderElectionRecordAnnotationKey] = text
	}
	if len(annotations) > 0 {
		meta["annotations"] = annotations
	}
	return json.Marshal(patch)
}

// annotated returns the record of an annotation with some fields changed. It replaces an invalid
// record.
func annotated(content string, fields map[string]any) (string, error) {
	record := map[string]any{}
	if err := json.Unmarshal([]byte(content), &record); err != nil {
		record = map[string]any{}
	}
	maps.Copy(record, fields)
	text, err := json.Marshal(record)
	return string(text), failure.Wrap(err, "writing the record")
}

// recent reports whether the mesh renewed the record within the lease's duration, by
// the clocks of managers. Then it is no record of a restored backup: to restore etcd takes longer.
func (r record) recent(now time.Time) bool {
	age := now.Sub(r.renewed)
	return r.ours() && age < leaseDuration && age > -clockSkew
}

// recordFields returns the changed fields of a record.
func recordFields(resource string, before record, do action, heldFor string, now time.Time) map[string]any {
	at, transitions := now.UTC().Format(metav1.RFC3339Micro), "leaseTransitions"
	if resource != Leases {
		at, transitions = now.UTC().Format(time.RFC3339), "leaderTransitions"
	}
	switch do {
	case acquire:
		return map[string]any{
			"holderIdentity":       v1alpha1.LockIdentityPrefix + heldFor,
			"leaseDurationSeconds": int64(leaseDuration.Seconds()),
			"acquireTime":          at,
			"renewTime":            at,
			transitions:            before.transitions + 1,
		}
	case release:
		// Like clients that exit gracefully: others may acquire the lock at once.
		return map[string]any{"holderIdentity": "", "leaseDurationSeconds": int64(1), "acquireTime": at, "renewTime": at}
	case renew:
		return map[string]any{"holderIdentity": v1alpha1.LockIdentityPrefix + heldFor, "renewTime": at}
	case unmark:
	}
	return nil
}
