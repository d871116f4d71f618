package v1

import (
	"maps"
	"slices"

	"k8s.io/apimachinery/pkg/runtime"
)

// DeepCopy returns a copy that shares nothing with t.
func (t *Tally) DeepCopy() *Tally {
	out := *t
	t.ObjectMeta.DeepCopyInto(&out.ObjectMeta)
	out.Status.ReconciledBy = slices.Clone(t.Status.ReconciledBy)
	out.Status.Reconciles = maps.Clone(t.Status.Reconciles)
	out.Status.Generations = maps.Clone(t.Status.Generations)
	return &out
}

// DeepCopyObject makes Tally a runtime.Object.
func (t *Tally) DeepCopyObject() runtime.Object { return t.DeepCopy() }

// DeepCopyObject makes TallyList a runtime.Object.
func (l *TallyList) DeepCopyObject() runtime.Object {
	out := *l
	l.ListMeta.DeepCopyInto(&out.ListMeta)
	if l.Items != nil {
		out.Items = make([]Tally, len(l.Items))
		for i := range l.Items {
			out.Items[i] = *l.Items[i].DeepCopy()
		}
	}
	return &out
}
