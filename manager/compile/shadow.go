package compile

import (
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

const (
	minWindow = time.Second
	maxWindow = 5 * time.Minute
)

// Shadows reports whether the pods of a configuration are a shadow. No write of theirs takes
// effect, so they may lead beside any other pod.
func Shadows(c *v1alpha1.ShardingConfig) bool { return c.Spec.Shadow != nil }

// Window returns how long a shadow waits for others to make its changes. The problem is empty if
// it is valid.
func Window(s *v1alpha1.Shadow) (window time.Duration, problem string) {
	window, err := time.ParseDuration(string(s.Window)) // the schema holds its syntax
	if err != nil || window < minWindow || window > maxWindow {
		return 0, fmt.Sprintf("must be from %s to %s, such as 30s", minWindow, maxWindow)
	}
	return window, ""
}

// shadow renders how writes of a shadow are compared; nil for other configurations.
func shadow(c *v1alpha1.ShardingConfig) (*meshv1.Shadow, *Problem) {
	if !Shadows(c) {
		return nil, nil
	}
	window, problem := Window(c.Spec.Shadow)
	if problem != "" {
		return nil, &Problem{v1alpha1.ReasonInvalid, "spec.shadow.window " + problem}
	}
	return &meshv1.Shadow{WindowNs: int64(window), IgnoredFields: c.Spec.Shadow.IgnoredFields}, nil
}

// refuseUnmarked refuses a pod of a shadow that was admitted before its configuration existed: if
// that is deleted, its writes take effect.
func refuseUnmarked(pod *corev1.Pod, p *meshv1.PodPolicy) {
	if !Exclusive(pod) {
		p.Refuse = fmt.Sprintf("pod %s/%s was admitted before its ShardingConfig, or trusts the apiserver's CA as well, so that its writes could take effect: delete the pod so that it is admitted anew", pod.Namespace, pod.Name)
	}
}
