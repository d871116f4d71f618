package decide

import (
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
)

// crashes are the restarts of containers of a shard's pods, by uid, before a rollout reached the
// shard. Pods that were created later are not among them.
type crashes struct {
	revision, shard string
	before          map[string]int32
}

// restartsTooOften reports whether containers of a shard that has not soaked restart more often
// than its analysis permits, which fails the revision. In contrast to other counts, these do not
// begin anew when the shard does not serve, because a restart is a reason for that.
func (d *deciding) restartsTooOften(s *step) bool {
	v, analysis := d.v, d.v.Spec.Config.Spec.Root.Rollout.Analysis
	if analysis == nil || analysis.MaxRestarts == nil || s.Soaked || v.restored() {
		return false
	}
	c := &d.memory.crashes
	begins := c.revision != v.Revision.Update || c.shard != s.Name
	if begins {
		*c = crashes{v.Revision.Update, s.Name, map[string]int32{}}
	}
	n := int32(0)
	for uid, m := range d.next.Members {
		pod := v.Pods.ByUID[uid]
		if m.Shard != s.Name || pod == nil {
			continue
		}
		if begins {
			c.before[uid] = Restarts(pod)
		}
		if v.hasRevision(pod) {
			n += Restarts(pod) - c.before[uid]
		}
	}
	if n <= *analysis.MaxRestarts {
		return false
	}
	d.rollout.status.Failure = fmt.Sprintf("containers have restarted %d times, more than %d", n, *analysis.MaxRestarts)
	return true
}

// Restarts returns how often containers of a pod have restarted.
func Restarts(p *corev1.Pod) (n int32) {
	for _, c := range slices.Concat(p.Status.InitContainerStatuses, p.Status.ContainerStatuses) {
		n += c.RestartCount
	}
	return n
}
