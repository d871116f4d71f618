// Package origin identifies the objects that shards follow from. Users wrote them as
// ShardingConfigs, or as objects of a dialect, which are ShardingConfigs in memory and keep the
// apiVersion and kind that they were written with.
package origin

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	kridge "github.com/ctrlmesh/ctrlmesh/api/kridge/v1alpha1"
	kruise "github.com/ctrlmesh/ctrlmesh/api/kruise/v1alpha1"
)

// Kinds of sources.
var (
	Native     = v1alpha1.GroupVersion.WithKind("ShardingConfig")
	Kridge     = kridge.GroupVersion.WithKind("ShardingConfig")
	VirtualApp = kruise.GroupVersion.WithKind("VirtualApp")
)

// Name identifies a source. Objects of different kinds may have the same name.
type Name struct {
	Kind schema.GroupKind
	types.NamespacedName
}

// Of returns the name of a source.
func Of(c *v1alpha1.ShardingConfig) Name {
	return Name{KindOf(c).GroupKind(), types.NamespacedName{Namespace: c.Namespace, Name: c.Name}}
}

func (n Name) String() string { return describe(n.Kind) + " " + n.NamespacedName.String() }

// KindOf returns the kind that a user wrote. Objects without apiVersion and kind are native.
func KindOf(c *v1alpha1.ShardingConfig) schema.GroupVersionKind {
	if c.APIVersion == "" {
		return Native
	}
	return c.GroupVersionKind()
}

// IsNative reports whether a user, or the manager, wrote a ShardingConfig of the mesh itself.
func IsNative(c *v1alpha1.ShardingConfig) bool { return KindOf(c) == Native }

// Describe names a source for users of its namespace.
func Describe(c *v1alpha1.ShardingConfig) string {
	return describe(KindOf(c).GroupKind()) + " " + c.Name
}

// Among names a source in a list of ShardingConfigs.
func Among(c *v1alpha1.ShardingConfig) string {
	if IsNative(c) {
		return c.Name
	}
	return Describe(c)
}

// describe names the group only where the kind alone would be ambiguous.
func describe(kind schema.GroupKind) string {
	if kind == Kridge.GroupKind() {
		return kind.String()
	}
	return kind.Kind
}

// problem is the annotation, in memory only, that says why a source is invalid.
const problem = v1alpha1.GroupName + "/problem"

// Problem returns why an object of a dialect cannot be translated; empty if it can.
func Problem(c *v1alpha1.ShardingConfig) string {
	if IsNative(c) {
		return "" // its annotations are the user's
	}
	return c.Annotations[problem]
}

// SetProblem sets the result of Problem.
func SetProblem(c *v1alpha1.ShardingConfig, message string) {
	delete(c.Annotations, problem)
	if message != "" {
		metav1.SetMetaDataAnnotation(&c.ObjectMeta, problem, message)
	}
}

// Conflicts sets the problem of each object of a dialect that has the name of a native object,
// or of an older object of another dialect: their shards and locks would have the same names.
// Admission refuses them unless both are created at once.
func Conflicts(configs []*v1alpha1.ShardingConfig) {
	first := map[types.NamespacedName]*v1alpha1.ShardingConfig{}
	for _, c := range slices.SortedFunc(slices.Values(configs), older) {
		name := Of(c).NamespacedName
		other := first[name]
		if other == nil {
			first[name] = c
		} else if !IsNative(c) {
			SetProblem(c, fmt.Sprintf("%s has the same name, so that shards would be confused: delete one of them", Describe(other)))
		}
	}
}

// older orders native objects first, and others by age.
func older(a, b *v1alpha1.ShardingConfig) int {
	rank := func(c *v1alpha1.ShardingConfig) int {
		if IsNative(c) {
			return 0
		}
		return 1
	}
	return cmp.Or(cmp.Compare(rank(a), rank(b)), a.CreationTimestamp.Compare(b.CreationTimestamp.Time), strings.Compare(Of(a).String(), Of(b).String()))
}
