package v1

import (
	"maps"
	"slices"

	"k8s.io/apimachinery/pkg/runtime"
)

// DeepCopyInto makes out a copy that shares nothing with t.
func (t *Tally) DeepCopyInto(out *Tally) {
	*out = *t
	t.ObjectMeta.DeepCopyInto(&out.ObjectMeta)
	out.Status.ReconciledBy = slices.Clone(t.Status.ReconciledBy)
	out.Status.Reconciles = maps.Clone(t.Status.Reconciles)
	out.Status.Generations = maps.Clone(t.Status.Generations)
	out.Status.Refreshed = t.Status.Refreshed.DeepCopy()
}

// DeepCopy returns a copy that shares nothing with t.
func (t *Tally) DeepCopy() *Tally {
	out := new(Tally)
	t.DeepCopyInto(out)
	return out
}

// DeepCopyObject makes Tally a runtime.Object.
func (t *Tally) DeepCopyObject() runtime.Object { return t.DeepCopy() }

// DeepCopyInto makes out a copy that shares nothing with l.
func (l *TallyList) DeepCopyInto(out *TallyList) {
	*out = *l
	l.ListMeta.DeepCopyInto(&out.ListMeta)
	if l.Items != nil {
		out.Items = make([]Tally, len(l.Items))
		for i := range l.Items {
			l.Items[i].DeepCopyInto(&out.Items[i])
		}
	}
}

// DeepCopyObject makes TallyList a runtime.Object.
func (l *TallyList) DeepCopyObject() runtime.Object {
	out := new(TallyList)
	l.DeepCopyInto(out)
	return out
}
