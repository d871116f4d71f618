package locks

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"strings"
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
	// clockSkew bounds by how much the clock of another manager may be ahead.
	clockSkew = 5 * time.Second
	// defaultDuration applies to records without a lease duration.
	defaultDuration = 15 * time.Second
)

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
	var content []byte
	if resource == Leases {
		u, isUnstructured := o.(*unstructured.Unstructured)
		if !isUnstructured {
			return record{}, false, fmt.Errorf("reading the record of %T", o)
		}
		if content, err = json.Marshal(u.Object["spec"]); err != nil {
			return record{}, false, fmt.Errorf("reading the record: %w", err)
		}
	} else {
		text, has := o.GetAnnotations()[resourcelock.LeaderElectionRecordAnnotationKey]
		if !has {
			r, ok := forLife(o)
			return r, ok, nil
		}
		content = []byte(text)
	}
	var spec lockSpec
	if err := json.Unmarshal(content, &spec); err != nil && resource == Leases {
		return record{}, false, fmt.Errorf("reading the record: %w", err)
	} // a broken annotation is an empty record, as for clients
	r = record{
		holder:      spec.HolderIdentity,
		duration:    time.Duration(spec.LeaseDurationSeconds) * time.Second,
		transitions: max(spec.LeaseTransitions, spec.LeaderTransitions),
		content:     string(content),
		marked:      o.GetLabels()[v1alpha1.LockHeldLabel] == "true",
	}
	if at, err := time.Parse(time.RFC3339Nano, spec.RenewTime); err == nil {
		r.renewed = at
	}
	if r.duration <= 0 {
		r.duration = defaultDuration
	}
	return r, true, nil
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

// LeaseOf returns for how long the holder of a lock may believe that it holds it after its last
// renewal; 0 if nobody holds it.
func LeaseOf(ctx context.Context, c client.Reader, name types.NamespacedName) (longest time.Duration, err error) {
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
func write(resource string, o client.Object, before record, do action, heldFor string, now time.Time) ([]byte, error) {
	meta := map[string]any{"resourceVersion": o.GetResourceVersion(), "uid": o.GetUID()}
	annotations := map[string]any{}
	switch do {
	case acquire:
		meta["labels"] = map[string]any{v1alpha1.LockHeldLabel: "true"}
		annotations[v1alpha1.LockHolderAnnotation] = heldFor
	case release, unmark:
		meta["labels"] = map[string]any{v1alpha1.LockHeldLabel: nil}
		annotations[v1alpha1.LockHolderAnnotation] = nil
	case renew:
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
	case renew, unmark:
	}
	return map[string]any{"renewTime": at}
}
