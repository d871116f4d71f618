package chart

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/yaml"

	"github.com/ctrlmesh/ctrlmesh/tests/tools"
)

const (
	deployDir = "../../deploy"
	chartDir  = deployDir + "/chart"
	meshSpace = "ctrlmesh-system"
)

var helmProgram = sync.OnceValues(func() (string, error) {
	return tools.Program(context.Background(), "../..", "helm", "helm")
})

// helm runs helm and returns what it printed. An error has its message.
func helm(t *testing.T, args ...string) (string, error) {
	t.Helper()
	program, err := helmProgram()
	require.NoError(t, err)
	cmd := exec.Command(program, args...)
	home := t.TempDir()
	cmd.Env = append(os.Environ(), "HELM_CACHE_HOME="+home, "HELM_CONFIG_HOME="+home, "HELM_DATA_HOME="+home, "KUBECONFIG="+os.DevNull)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("running helm: %w: %s", err, stderr.String())
	}
	return stdout.String(), nil
}

// template renders a chart for a namespace.
func template(t *testing.T, chart, namespace string, args ...string) (string, error) {
	t.Helper()
	return helm(t, append([]string{"template", "ctrlmesh", chart, "--namespace", namespace, "--kube-version", "1.32.0"}, args...)...)
}

// objects are by kind, namespace and name.
type objects map[string]*unstructured.Unstructured

func (o objects) add(t *testing.T, text string) {
	t.Helper()
	for in := yaml.NewYAMLOrJSONDecoder(strings.NewReader(text), 4096); ; {
		var obj unstructured.Unstructured
		err := in.Decode(&obj.Object)
		if errors.Is(err, io.EOF) {
			return
		}
		require.NoError(t, err)
		if len(obj.Object) == 0 {
			continue
		}
		key := obj.GetKind() + " " + obj.GetNamespace() + "/" + obj.GetName()
		require.NotContains(t, o, key, "rendered twice")
		o[key] = &obj
	}
}

func render(t *testing.T, args ...string) objects {
	t.Helper()
	text, err := template(t, chartDir, meshSpace, args...)
	require.NoError(t, err)
	out := objects{}
	out.add(t, text)
	return out
}

// kustomized returns the resources of a kustomization without patches.
func kustomized(t *testing.T, dir string) objects {
	t.Helper()
	out := objects{}
	addKustomization(t, out, dir)
	return out
}

func addKustomization(t *testing.T, out objects, dir string) {
	t.Helper()
	var k struct{ Resources []string }
	data, err := os.ReadFile(filepath.Join(dir, "kustomization.yaml"))
	require.NoError(t, err)
	require.NoError(t, yaml.Unmarshal(data, &k))
	for _, resource := range k.Resources {
		path := filepath.Join(dir, resource)
		if filepath.Ext(path) != ".yaml" {
			addKustomization(t, out, path)
			continue
		}
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		out.add(t, string(text))
	}
}
