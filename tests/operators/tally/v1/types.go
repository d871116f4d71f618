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

// BacklogMessage is what the operator logs, with a map of seconds, of the objects that
// it has in its cache and does not come to.
const BacklogMessage = "objects in the cache wait in the queue"

// Tally is an object on which every pod that reconciles it leaves its name.
type Tally struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata"`

	Spec   TallySpec   `json:"spec"`
	Status TallyStatus `json:"status"`
}

// TallySpec is what a user may change to cause a reconcile.
type TallySpec struct {
	// Say is repeated in the status.
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
	// Refreshed is when a pod last said that it still looks after the object, if
	// it was told to say so.
	Refreshed *metav1.MicroTime `json:"refreshed,omitempty"`
}

// Record notes that pod reconciles the object's current generation. It reports
// whether that was news.
//
// Each pod counts a generation once, however often it is asked. So two pods that
// both see an object both show, and yet do not answer each other's writes for ever.
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

// Refresh notes that the object is looked after now. It reports whether that was
// news: it is if nobody has said so for a while.
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
