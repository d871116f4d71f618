package trial

import (
	"context"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

// lastLines is how much of each pod's log a failure shows.
const lastLines = 4

// explain prints the status and the logs of the operator's pods when a step has failed. It skips
// what it cannot read: the failure itself is reported elsewhere.
func (t *trial) explain(ctx context.Context) {
	if root, err := t.root(ctx); err == nil {
		for _, cond := range root.Status.Conditions {
			t.say("  . %s=%s %s: %s", cond.Type, cond.Status, cond.Reason, cond.Message)
		}
		for _, lock := range root.Status.Locks {
			t.say("  . lock %s/%s: holder %q, held by the mesh %t, discovered %t", lock.Namespace, lock.Name, lock.Holder, lock.HeldByMesh, lock.Discovered)
		}
	}
	pods, err := t.pods(ctx)
	if err != nil {
		return
	}
	for _, pod := range pods {
		t.say("  . pod %s: %s, %d restarts", pod.Name, pod.Status.Phase, kube.Restarts(&pod))
		options := &corev1.PodLogOptions{TailLines: new(int64(lastLines))}
		log, err := t.Clientset.CoreV1().Pods(pod.Namespace).GetLogs(pod.Name, options).DoRaw(ctx)
		if err != nil {
			continue
		}
		for line := range strings.Lines(string(log)) {
			t.say("  .   %s", strings.TrimSpace(line))
		}
	}
}
