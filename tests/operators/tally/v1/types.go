package v1

import (
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

var (
	// GroupVersion is the group and version of Tally.
	GroupVersion = schema.GroupVersion{Group: "tally.example.com", Version: "v1"}

	builder = runtime.NewSchemeBuilder(func(scheme *runtime.Scheme) error {
		scheme.AddKnownTypes(GroupVersion, &Tally{}, &TallyList{})
		metav1.AddToGroupVersion(scheme, GroupVersion)
		return nil
	})

	// AddToScheme adds Tally to a scheme.
	AddToScheme = builder.AddToScheme
)

// BacklogMessage is the message of the log line, with a map of seconds, about objects that are
// in the cache and wait in the queue.
const BacklogMessage = "objects in the cache wait in the queue"

// Tally is an object that records every pod that reconciles it.
type Tally struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata"`

	Spec   TallySpec   `json:"spec"`
	Status TallyStatus `json:"status"`
}

// TallySpec is what a user may change to cause a reconcile.
type TallySpec struct {
	// Say is copied to the status.
	Say string `json:"say,omitempty"`
}

// TallyStatus records who reconciled the object.
type TallyStatus struct {
	// ObservedGeneration is the newest generation that any pod reconciled.
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
	// Said is spec.say of that generation.
	Said string `json:"said,omitempty"`
	// ReconciledBy are the pods that ever reconciled the object, the first one first.
	ReconciledBy []string `json:"reconciledBy,omitempty"`
	// Reconciles counts the reconciles of each pod, one per generation.
	Reconciles map[string]int64 `json:"reconciles,omitempty"`
	// Generations is the newest generation that each pod reconciled.
	Generations map[string]int64 `json:"generations,omitempty"`
	// Refreshed is when a pod last wrote the object without a change, if the operator runs
	// with -refresh.
	Refreshed *metav1.MicroTime `json:"refreshed,omitempty"`
}

// Record records that pod reconciles the object's current generation. It reports whether the
// status changed.
//
// Each pod records a generation once. So the status shows two pods that both reconcile an
// object, and their writes do not trigger each other without end.
func (t *Tally) Record(pod string) bool {
	s := &t.Status
	if s.Generations[pod] >= t.Generation {
		return false
	}
	if s.Generations == nil {
		s.Generations = map[string]int64{}
	}
	if s.Reconciles == nil {
		s.Reconciles = map[string]int64{}
	}
	s.Generations[pod] = t.Generation
	s.Reconciles[pod]++
	if !slices.Contains(s.ReconciledBy, pod) {
		s.ReconciledBy = append(s.ReconciledBy, pod)
	}
	s.ObservedGeneration, s.Said = t.Generation, t.Spec.Say
	return true
}

// Refresh records the current time unless it was recorded a short time ago. It reports
// whether the status changed.
func (t *Tally) Refresh(now time.Time, every time.Duration) bool {
	if r := t.Status.Refreshed; r != nil && now.Sub(r.Time) < every {
		return false
	}
	t.Status.Refreshed = &metav1.MicroTime{Time: now}
	return true
}

// TallyList is a list of Tally.
type TallyList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata"`

	Items []Tally `json:"items"`
}
