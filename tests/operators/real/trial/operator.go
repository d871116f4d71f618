package trial

import (
	"cmp"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"time"

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

// Operator describes a published operator: how to install it, what to divide, and how its
// objects change in a trial.
type Operator struct {
	// Name of the module folder below src, and of the folder below manifests.
	Name string
	// Home is the namespace into which the operator is installed.
	Home string
	// Source is where its manifests come from.
	Source Source
	// Debian is the package of the client, for an operator of src that is not built from a module.
	Debian string
	// Images are built from the operator's module. The manifests name them.
	Images []Image
	// Requires are operators of the catalogue that are installed first, as they are.
	Requires []string
	// Kind and Target name the workload that is adopted; Target is Name if it is empty.
	Kind, Target string
	// Replicas outside the mesh; 2 if it is 0.
	Replicas int32
	// Lock that the root names; nil if the mesh discovers it, or if there is none.
	Lock *Lock
	// Unreleased is how long a lock stays held after its holder has exited: the lease
	// duration, if the operator does not release it; 0 if it does.
	Unreleased time.Duration
	// Lockless is true for an operator without leader election.
	Lockless bool
	// Divided are the resources that the shards divide.
	Divided []meshv1alpha1.ResourceGroup
	// Webhook is where the members serve webhooks; nil if they serve none.
	Webhook *meshv1alpha1.WebhookConfig
	// Needed says what the installation needed beside replicas and label, for the report.
	Needed string
	// Note says what had to be shared or changed, for the report.
	Note string
	// Controllers are those that the cluster's own controller manager must not run
	// meanwhile.
	Controllers []string
	Workload
}

// Workload says which objects of an operator change in a trial, and which are compared.
type Workload struct {
	// Tracked is the kind whose objects change and show when the operator has acted.
	Tracked schema.GroupVersionKind
	// Condition of the status with the observed generation, for a status that has none of its
	// own; Ready if it is empty.
	Condition string
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

// target returns the name of the workload that is adopted.
func (o *Operator) target() string { return cmp.Or(o.Target, o.Name) }

// outside returns how many pods run outside the mesh. Without a lock, a second pod would
// write the same objects as the first.
func (o *Operator) outside() int32 {
	if o.Lockless {
		return 1
	}
	return cmp.Or(o.Replicas, 2)
}

// manifest returns a manifest of the operator with its variables set, nil if it has none.
func (o *Operator) manifest(file string, variables ...string) ([]byte, error) {
	text, err := manifests.ReadFile("manifests/" + o.Name + "/" + file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("reading a manifest of %s: %w", o.Name, err)
	}
	return []byte(strings.NewReplacer(append(variables, "$(HOME)", o.Home)...).Replace(string(text))), nil
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
