package v2

import "k8s.io/apimachinery/pkg/runtime"

// DeepCopyInto makes out a copy that shares nothing with p.
func (p *Paper) DeepCopyInto(out *Paper) {
	*out = *p
	p.ObjectMeta.DeepCopyInto(&out.ObjectMeta)
}

// DeepCopyObject makes Paper a runtime.Object.
func (p *Paper) DeepCopyObject() runtime.Object {
	out := new(Paper)
	p.DeepCopyInto(out)
	return out
}

// DeepCopyObject makes PaperList a runtime.Object.
func (l *PaperList) DeepCopyObject() runtime.Object {
	out := *l
	l.DeepCopyInto(&out.ListMeta)
	out.Items = make([]Paper, len(l.Items))
	for i := range l.Items {
		l.Items[i].DeepCopyInto(&out.Items[i])
	}
	return &out
}
