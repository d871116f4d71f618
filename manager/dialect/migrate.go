package dialect

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	kridge "github.com/ctrlmesh/ctrlmesh/api/kridge/v1alpha1"
	kruise "github.com/ctrlmesh/ctrlmesh/api/kruise/v1alpha1"
)

// Object is an object of any kind.
type Object interface {
	metav1.Object
	runtime.Object
}

// Migration is the native form of objects of dialects, as their authors would write it.
type Migration struct {
	// Objects are ShardingConfigs and CircuitBreakers, in the order of the objects that they
	// replace.
	Objects []Object
	// Notes say what the native objects do not express, what they do otherwise, and what is left
	// to do. Each begins with the kind and the name of the object that it is about.
	Notes []string
}

// Migrate returns native objects that replace objects of dialects. The VirtualApps that a
// TrafficPolicy targets must be among the objects. The error names all objects that admission
// would refuse, which have no native form.
func Migrate(objects ...Object) (Migration, error) {
	m := migration{named: map[types.NamespacedName]string{}}
	for _, o := range objects {
		if app, ok := o.(*kruise.VirtualApp); ok {
			m.apps = append(m.apps, app)
		}
	}
	for _, o := range objects {
		m.add(o)
	}
	return m.Migration, errors.Join(m.errs...)
}

// migration is a Migration in the making.
type migration struct {
	Migration
	apps  []*kruise.VirtualApp
	named map[types.NamespacedName]string // the objects that ShardingConfigs replace
	errs  []error
}

func (m *migration) add(o Object) {
	switch o := o.(type) {
	case *kruise.VirtualApp:
		t, errs := VirtualApp(o)
		m.addTranslation(o, t, errs)
		m.note(o, "its pods were on the mesh because of its selector: add the label %s: \"true\" to the pod template", v1alpha1.EnableProxyLabel)
	case *kruise.TrafficPolicy:
		t, errs := TrafficPolicy(o, m.apps)
		m.addTranslation(o, t, errs)
		m.note(o, "the CircuitBreakers select pods by the present subsets of the VirtualApps: change them when you change the subsets")
	case *kridge.ShardingConfig:
		if root := o.Labels[kridge.RootLabel]; root != "" {
			m.note(o, "left out, because Kridge derived it from ShardingConfig %s, and the mesh derives its own: delete it", root)
			return
		}
		t, errs := ShardingConfig(o)
		m.addTranslation(o, t, errs)
		m.note(o, "replace the label %s on the pod template by %s", kridge.EnableProxyLabel, v1alpha1.EnableProxyLabel)
	default:
		m.errs = append(m.errs, fmt.Errorf("%T %s/%s is not an object of a dialect", o, o.GetNamespace(), o.GetName()))
	}
}

func (m *migration) addTranslation(o Object, t Translation, errs field.ErrorList) {
	if len(errs) > 0 {
		m.errs = append(m.errs, fmt.Errorf("%s: %w", describe(o), errs.ToAggregate()))
		return
	}
	for _, about := range slices.Concat(t.Warnings, t.Remainder) {
		m.note(o, "%s", about)
	}
	if c := t.Config; c != nil {
		name := types.NamespacedName{Namespace: c.Namespace, Name: c.Name}
		if other, taken := m.named[name]; taken {
			m.errs = append(m.errs, fmt.Errorf("%s: a ShardingConfig of its name replaces %s: rename one of them", describe(o), other))
			return
		}
		m.named[name] = describe(o)
		c.ObjectMeta, c.Status = written(c.ObjectMeta), v1alpha1.ShardingConfigStatus{}
		m.Objects = append(m.Objects, c)
	}
	for _, b := range t.Breakers {
		b.ObjectMeta, b.Status = written(b.ObjectMeta), v1alpha1.CircuitBreakerStatus{}
		m.Objects = append(m.Objects, b)
	}
}

func (m *migration) note(o Object, format string, args ...any) {
	m.Notes = append(m.Notes, describe(o)+": "+fmt.Sprintf(format, args...))
}

func describe(o Object) string {
	kind := "ShardingConfig of Kridge"
	switch o.(type) {
	case *kruise.VirtualApp:
		kind = "VirtualApp"
	case *kruise.TrafficPolicy:
		kind = "TrafficPolicy"
	}
	return kind + " " + o.GetNamespace() + "/" + o.GetName()
}

// written returns the metadata that an author writes.
func written(in metav1.ObjectMeta) metav1.ObjectMeta {
	out := metav1.ObjectMeta{Namespace: in.Namespace, Name: in.Name, Labels: maps.Clone(in.Labels), Annotations: maps.Clone(in.Annotations)}
	delete(out.Labels, v1alpha1.RootLabel)
	delete(out.Annotations, corev1.LastAppliedConfigAnnotation)
	return out
}
