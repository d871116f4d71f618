package trial

import (
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

//go:embed manifests
var manifests embed.FS

// Kinds of the operators' workloads.
const (
	deployment  = "Deployment"
	statefulSet = "StatefulSet"
)

// Operator describes a published operator: how to run it, what to divide, and how its
// objects change in a trial.
type Operator struct {
	// Name of the module folder below src, of the image and of the workload.
	Name string
	// Kind of the workload.
	Kind string
	// Command and Args of the container. "$(HOME)" in Args is the operator's namespace.
	Command, Args []string
	// Lock that the root names; nil if the mesh discovers it, or if there is none.
	Lock *Lock
	// Unreleased is how long a lock stays held after its holder has exited: the lease
	// duration, if the operator does not release it; 0 if it does.
	Unreleased time.Duration
	// Lockless is true for an operator without leader election.
	Lockless bool
	// Divided are the resources that the shards divide.
	Divided []meshv1alpha1.ResourceGroup
	// Note says what had to be shared or changed, for the report.
	Note string
	// CRDs are globs below the folder of the operator's module.
	CRDs []string
	// Probe is the readiness probe of the container.
	Probe *corev1.Probe
	// Volumes are mounted at the given paths.
	Volumes map[string]corev1.VolumeSource
	// Certificate is where a self-signed serving certificate is mounted, if the operator
	// requires one.
	Certificate string
	// Webhooks is the file of the operator's webhook configurations, below the folder of its
	// module; empty if none are registered.
	Webhooks string
	// Controllers are those that the cluster's own controller manager must not run
	// meanwhile.
	Controllers []string
	Workload
}

// Workload says which objects of an operator change in a trial, and which are compared.
type Workload struct {
	// Tracked is the kind whose objects change and show when the operator has acted.
	Tracked schema.GroupVersionKind
	// Patches are JSON merge patches that the tracked object gets in turn. None: only
	// passing objects change.
	Patches []string
	// Evicts is true if the operator itself deletes the passing objects.
	Evicts bool
	// Compared are the kinds whose end states must equal the reference.
	Compared []schema.GroupVersionKind
	// Elapsed are pairs of texts, as of strings.NewReplacer, for messages that depend on how
	// long the operator has run.
	Elapsed []string
}

// Lock names a leader-election lock; its Namespace is empty for the operator's own.
type Lock struct{ Namespace, Name string }

// Names of the objects of a tenant that change.
const (
	trackedName = "tracked"
	passingName = "passing"
)

// manifest returns a manifest of the operator with its variables set, nil if it has none.
func (o *Operator) manifest(file string, variables ...string) ([]byte, error) {
	text, err := manifests.ReadFile("manifests/" + o.Name + "/" + file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("reading a manifest of %s: %w", o.Name, err)
	}
	return []byte(strings.NewReplacer(variables...).Replace(string(text))), nil
}

func resources(group string, plurals ...string) meshv1alpha1.ResourceGroup {
	return meshv1alpha1.ResourceGroup{APIGroups: []string{group}, Resources: plurals}
}

func kinds(group, version string, kinds ...string) (out []schema.GroupVersionKind) {
	for _, kind := range kinds {
		out = append(out, schema.GroupVersionKind{Group: group, Version: version, Kind: kind})
	}
	return out
}
