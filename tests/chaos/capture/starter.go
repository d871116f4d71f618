package capture

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ctrlmesh/ctrlmesh/tests/chaos/harness"
)

// starter returns a pod that sends a request and exits. It is restarted until the request
// succeeds.
func starter(home, name, mode, node string) *corev1.Pod {
	const account = "/var/run/secrets/kubernetes.io/serviceaccount/"
	p := harness.NewPod(home, name, startsConfig, mode, node, "gonet", "get", "-t", "20s", "-token", account+"token", "-ca", account+"ca.crt",
		"https://$(KUBERNETES_SERVICE_HOST):$(KUBERNETES_SERVICE_PORT)/api/v1/configmaps")
	p.Labels["app"] = startsConfig
	p.Spec.Containers[0].Image = harness.NetImage
	p.Spec.RestartPolicy = corev1.RestartPolicyOnFailure
	return p
}

// namespacesSeen returns the namespaces of the objects in the list that a starter printed.
func (s *suite) namespacesSeen(p *corev1.Pod) ([]string, error) {
	var list metav1.PartialObjectMetadataList
	text, err := s.output(p, "stdout")
	if err != nil {
		return nil, err
	}
	if err := json.Unmarshal([]byte(text), &list); err != nil {
		return nil, fmt.Errorf("reading its list: %w", err)
	}
	var out []string
	for _, item := range list.Items {
		out = append(out, item.Namespace)
	}
	slices.Sort(out)
	return slices.Compact(out), nil
}

// lastLine returns the last line that a failed starter printed.
func (s *suite) lastLine(p *corev1.Pod) string {
	text, err := s.output(p, "stderr")
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return lines[len(lines)-1]
}

// output returns what a pod's container printed last time, from the node's disk.
func (s *suite) output(p *corev1.Pod, stream string) (string, error) {
	files, err := filepath.Glob(strings.TrimSuffix(s.ContainerLog(p), "*"))
	if err != nil {
		return "", fmt.Errorf("finding its log: %w", err)
	}
	if len(files) == 0 {
		return "", errors.New("it has no log")
	}
	text, err := os.ReadFile(files[len(files)-1])
	if err != nil {
		return "", fmt.Errorf("reading its log: %w", err)
	}
	var out strings.Builder
	for line := range strings.Lines(string(text)) {
		parts := strings.SplitN(line, " ", 4) // time, stream, whether the line goes on
		if len(parts) < 4 || parts[1] != stream {
			continue
		}
		if parts[2] == "P" {
			parts[3] = strings.TrimSuffix(parts[3], "\n")
		}
		out.WriteString(parts[3])
	}
	return out.String(), nil
}
