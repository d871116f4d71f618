package kube

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/go-logr/logr"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

// Cluster is the cluster under test, as its administrator sees it.
type Cluster struct {
	client.Client
	Clientset kubernetes.Interface
	Config    *rest.Config

	// Root is the root of this repository, Kubeconfig the file that Config is from.
	Root, Kubeconfig string
}

// Connect finds the cluster of tests/cluster or, if it is not running, the one that
// KUBECONFIG names. If both exist and differ, it fails: tests must not run against another
// cluster by accident. The client's scheme has the kinds of Kubernetes and of the mesh, and
// those that the functions add.
func Connect(add ...func(*runtime.Scheme) error) (*Cluster, error) {
	return ConnectTo("", add...)
}

// ConnectTo is Connect to another address of the cluster's apiserver, host:port, unless it is empty.
func ConnectTo(address string, add ...func(*runtime.Scheme) error) (*Cluster, error) {
	root, err := findRoot()
	if err != nil {
		return nil, err
	}
	c := &Cluster{Root: root}
	if c.Kubeconfig, err = findKubeconfig(root, os.Getenv("KUBECONFIG")); err != nil {
		return nil, err
	}
	if c.Config, err = clientcmd.BuildConfigFromFlags("", c.Kubeconfig); err != nil {
		return nil, fmt.Errorf("reading %s: %w", c.Kubeconfig, err)
	}
	if address != "" {
		c.Config.Host = "https://" + address
	}
	c.Config.QPS = -1 // the apiserver's own fairness is enough
	c.Config.UserAgent = "ctrlmesh-tests"

	// The libraries' logs would hide the output of tests.
	ctrl.SetLogger(logr.Discard())
	klog.SetLogger(logr.Discard())

	scheme := runtime.NewScheme()
	known := []func(*runtime.Scheme) error{clientgoscheme.AddToScheme, apiextensionsv1.AddToScheme, meshv1alpha1.AddToScheme}
	for _, f := range append(known, add...) {
		if err := f(scheme); err != nil {
			return nil, fmt.Errorf("building the scheme: %w", err)
		}
	}
	if c.Client, err = client.New(c.Config, client.Options{Scheme: scheme}); err != nil {
		return nil, fmt.Errorf("connecting to %s: %w", c.Config.Host, err)
	}
	if c.Clientset, err = kubernetes.NewForConfig(c.Config); err != nil {
		return nil, fmt.Errorf("connecting to %s: %w", c.Config.Host, err)
	}
	return c, nil
}

// findRoot looks upwards from the working directory, which for tests is their package's.
func findRoot() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", fmt.Errorf("finding the repository: %w", err)
	}
	for ; ; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir, nil
		}
		if dir == filepath.Dir(dir) {
			return "", errors.New("finding the repository: no go.mod above the working directory")
		}
	}
}

// findKubeconfig chooses between the repository's own cluster and the given one.
func findKubeconfig(root, given string) (string, error) {
	own := filepath.Join(root, ".run", "kubeconfig")
	_, err := os.Stat(own)
	switch started := err == nil; {
	case !started && given == "":
		return "", errors.New("no cluster: neither .run/kubeconfig (make cluster-up) nor KUBECONFIG")
	case !started:
		return given, nil
	case given != "" && given != own:
		return "", fmt.Errorf("two clusters: KUBECONFIG is %s, and there is %s: unset one or end the other (make cluster-down)", given, own)
	}
	return own, nil
}
