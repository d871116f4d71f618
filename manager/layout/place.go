package layout

import (
	"cmp"
	"math"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/manager/handover"
)

// Place assigns shards to the pods that have none yet, and returns them by uid. Pods of a
// StatefulSet are assigned by ordinal, from 0. Pods of a Deployment are assigned to the
// first of the shards that lack most pods, those of a root with subsets by label; scheduled and admitted pods come before others.
// Pods that are terminating or have exited are omitted, and so are ordinals above those of
// the last shard. Surplus pods of a Deployment are spread evenly over the shards.
//
// outdated are the uids of assigned pods that must be restarted, sorted. Their shard no
// longer exists, their ordinal belongs to another shard, or their shard has surplus pods
// while another lacks some. The last may be true for a moment in any rollout.
//
// first is the first ordinal of a StatefulSet's pods.
// pods are all pods of the root's workload; assigned are the members, by uid.
func Place(root *v1alpha1.RootConfig, first int, pods []*corev1.Pod, assigned map[string]handover.Member) (placed map[string]string, outdated []string) {
	p := placing{shards: Shards(root), assigned: assigned, placed: map[string]string{}}
	p.pods = collect.Filter(pods, func(pod *corev1.Pod) bool {
		return pod.DeletionTimestamp == nil && pod.Status.Phase != corev1.PodSucceeded && pod.Status.Phase != corev1.PodFailed
	})
	slices.SortFunc(p.pods, func(a, b *corev1.Pod) int {
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Name, b.Name))
	})
	if len(p.shards) == 0 {
		for _, pod := range p.pods {
			if _, ok := assigned[string(pod.UID)]; ok {
				p.outdated = append(p.outdated, string(pod.UID))
			}
		}
	} else if target := Target(root); ByLabels(root) {
		p.byLabels(root)
	} else if target.Kind == StatefulSet {
		p.byOrdinal(target.Name, first)
	} else {
		p.byLack()
	}
	slices.Sort(p.outdated)
	return p.placed, p.outdated
}

type placing struct {
	shards   []Shard
	pods     []*corev1.Pod // live
	assigned map[string]handover.Member
	placed   map[string]string
	outdated []string
}

func (p *placing) byOrdinal(set string, first int) {
	for _, pod := range p.pods {
		shard := ""
		if n, ok := ordinal(set, pod.Name); ok && n >= first {
			shard, _ = ofOrdinal(p.shards, n-first)
		}
		p.place(pod, shard)
	}
}

func (p *placing) byLabels(root *v1alpha1.RootConfig) {
	for _, pod := range p.pods {
		subset := v1alpha1.DefaultSubset
		for _, s := range root.Subsets {
			if labels.SelectorFromSet(s.PodLabels).Matches(labels.Set(pod.Labels)) {
				subset = s.Name
				break
			}
		}
		p.place(pod, subsetName(root, subset))
	}
}

// place assigns a pod to the only shard that it can belong to; none if shard is empty.
func (p *placing) place(pod *corev1.Pod, shard string) {
	uid := string(pod.UID)
	switch member, ok := p.assigned[uid]; {
	case ok && member.Shard != shard:
		p.outdated = append(p.outdated, uid)
	case !ok && shard != "":
		p.placed[uid] = shard
	}
}

func (p *placing) byLack() {
	staying := make([][]*corev1.Pod, len(p.shards))
	var free []*corev1.Pod
	stale := make([]int, len(p.shards)) // members that act until they are replaced
	going := 0                          // pods that will be replaced
	for _, pod := range p.pods {
		member, ok := p.assigned[string(pod.UID)]
		switch i := slices.IndexFunc(p.shards, func(s Shard) bool { return s.Name == member.Shard }); {
		case !ok:
			free = append(free, pod)
		case i < 0:
			p.outdated = append(p.outdated, string(pod.UID))
			going++
		case member.Stale:
			stale[i]++
			going++
		default:
			staying[i] = append(staying[i], pod)
		}
	}
	slices.SortStableFunc(free, func(a, b *corev1.Pod) int { return cmp.Compare(ahead(b), ahead(a)) })
	for _, pod := range free {
		i := p.lacksMost(staying, stale, pod.Labels[templateHash])
		staying[i] = append(staying[i], pod)
		p.placed[string(pod.UID)] = p.shards[i].Name
	}
	for i, s := range p.shards {
		if len(staying[i]) >= max(s.Replicas, 1) {
			continue
		}
		if going > 0 {
			going--
			continue
		}
		p.freePod(staying, len(staying[i]) == 0)
	}
}

// ahead returns how far a pod has started. A pod that waits for a node must not get the
// shard that a running pod could serve.
func ahead(pod *corev1.Pod) (n int) {
	if pod.Spec.NodeName != "" {
		n++
		if pod.Annotations[v1alpha1.TrustAnnotation] != "" {
			n++
		}
	}
	return n
}

// lacksMost returns the index of the shard for a new pod with the given template hash.
// During a rollout, pods of another template are about to be deleted, so they only break
// ties. A shard without pods always comes before one with pods. Of shards that need a pod equally,
// one without a stale member comes first: without a lock, the member acts beside the new pod.
func (p *placing) lacksMost(staying [][]*corev1.Pod, stale []int, hash string) int {
	best, bestSame, bestAll := 0, math.Inf(1), math.Inf(1)
	for i, s := range p.shards {
		same := collect.Count(staying[i], func(pod *corev1.Pod) bool { return pod.Labels[templateHash] == hash })
		ofSame, ofAll := filled(s, same), filled(s, len(staying[i]))
		if cmp.Or(cmp.Compare(ofSame, bestSame), cmp.Compare(ofAll, bestAll), cmp.Compare(stale[i], stale[best])) < 0 {
			best, bestSame, bestAll = i, ofSame, ofAll
		}
	}
	return best
}

// filled returns the fraction of its replicas that a shard has. A shard that takes all
// remaining pods is nearly full with one pod, so that it gets more before other shards
// exceed their replicas.
func filled(s Shard, pods int) float64 {
	if s.Replicas == 0 {
		return min(float64(pods), math.Nextafter(1, 0))
	}
	return float64(pods) / float64(s.Replicas)
}

// freePod marks the youngest pod of the shard with most surplus pods as outdated, so that its
// successor is assigned to a shard that lacks pods. If forNobody is set, that shard has no
// pods at all, and all pods but one of a shard count as surplus.
func (p *placing) freePod(staying [][]*corev1.Pod, forNobody bool) {
	from, most := -1, 0
	for i, pods := range staying {
		needs := max(p.shards[i].Replicas, 1)
		if forNobody {
			needs = 1
		}
		if beyond := len(pods) - needs; beyond > most {
			from, most = i, beyond
		}
	}
	if from < 0 {
		return
	}
	last := len(staying[from]) - 1
	p.outdated = append(p.outdated, string(staying[from][last].UID))
	staying[from] = staying[from][:last]
}
