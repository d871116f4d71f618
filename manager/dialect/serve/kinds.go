// Package serve lets the manager read and write objects of the dialects as ShardingConfigs.
package serve

import (
	"errors"
	"maps"
	"reflect"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	kridge "github.com/ctrlmesh/ctrlmesh/api/kridge/v1alpha1"
	kruise "github.com/ctrlmesh/ctrlmesh/api/kruise/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/dialect"
	"github.com/ctrlmesh/ctrlmesh/manager/internal/bounds"
	"github.com/ctrlmesh/ctrlmesh/manager/internal/invalid"
	"github.com/ctrlmesh/ctrlmesh/manager/origin"
)

// AddToScheme adds the kinds of the dialects that are served.
func AddToScheme(s *runtime.Scheme) error {
	return errors.Join(kridge.AddToScheme(s), kruise.AddToScheme(s))
}

// Objects returns an empty object of each kind that is served.
func Objects() []client.Object {
	return []client.Object{&kridge.ShardingConfig{}, &kruise.VirtualApp{}, &kruise.TrafficPolicy{}}
}

// kind is a kind of objects that are translated to ShardingConfigs.
type kind struct {
	definition string // of deploy/crd
	new        func() client.Object
	list       func() client.ObjectList
	// items calls f for each object of a list.
	items func(list client.ObjectList, f func(client.Object))
	// translate returns the translation of an object, and its status.
	translate func(client.Object) (dialect.Translation, *v1alpha1.ShardingConfigStatus, field.ErrorList)
}

var kinds = map[schema.GroupVersionKind]kind{
	origin.Kridge: {
		definition: kridge.GroupName + "_shardingconfigs",
		new:        func() client.Object { return &kridge.ShardingConfig{} },
		list:       func() client.ObjectList { return &kridge.ShardingConfigList{} },
		items: func(list client.ObjectList, f func(client.Object)) {
			if l, ok := list.(*kridge.ShardingConfigList); ok {
				for i := range l.Items {
					f(&l.Items[i])
				}
			}
		},
		translate: func(o client.Object) (dialect.Translation, *v1alpha1.ShardingConfigStatus, field.ErrorList) {
			c, _ := o.(*kridge.ShardingConfig)
			t, errs := dialect.ShardingConfig(c)
			return t, &c.Status, errs
		},
	},
	origin.VirtualApp: {
		definition: kruise.GroupName + "_virtualapps",
		new:        func() client.Object { return &kruise.VirtualApp{} },
		list:       func() client.ObjectList { return &kruise.VirtualAppList{} },
		items: func(list client.ObjectList, f func(client.Object)) {
			if l, ok := list.(*kruise.VirtualAppList); ok {
				for i := range l.Items {
					f(&l.Items[i])
				}
			}
		},
		translate: func(o client.Object) (dialect.Translation, *v1alpha1.ShardingConfigStatus, field.ErrorList) {
			app, _ := o.(*kruise.VirtualApp)
			t, errs := dialect.VirtualApp(app)
			return t, &app.Status, errs
		},
	},
}

// Translate returns an object of a dialect as a ShardingConfig, with what its author may not
// expect, and its errors. With errors it is incomplete, and origin.Problem returns them.
func Translate(gvk schema.GroupVersionKind, o client.Object) (*v1alpha1.ShardingConfig, []string, field.ErrorList) {
	t, status, errs := kinds[gvk].translate(o)
	c := t.Config
	c.SetGroupVersionKind(gvk)
	c.Labels, c.Annotations = maps.Clone(c.Labels), maps.Clone(c.Annotations)
	delete(c.Labels, v1alpha1.RootLabel) // it is not derived, whatever its author says
	status.DeepCopyInto(&c.Status)
	problem := ""
	if len(errs) > 0 {
		problem = invalid.Message(errs)
	}
	origin.SetProblem(c, problem)
	return c, append(t.Warnings, t.Remainder...), errs
}

// Config returns what an object of a dialect stands for; false for other objects.
func Config(o any) (*v1alpha1.ShardingConfig, bool) {
	for gvk, k := range kinds {
		if object, ok := o.(client.Object); ok && reflect.TypeOf(k.new()) == reflect.TypeOf(o) {
			c, _, _ := Translate(gvk, object)
			return c, true
		}
	}
	return nil, false
}

// Decode translates an object in JSON; it returns nil for kinds that are not translated to
// ShardingConfigs.
func Decode(gvk schema.GroupVersionKind, namespace string, raw []byte) (*v1alpha1.ShardingConfig, []string, field.ErrorList, error) {
	k, ok := kinds[gvk]
	if !ok {
		return nil, nil, nil, nil
	}
	object := k.new()
	if err := bounds.Unmarshal(k.definition, raw, object); err != nil {
		return nil, nil, nil, err
	}
	object.SetNamespace(namespace)
	c, warned, errs := Translate(gvk, object)
	return c, warned, errs, nil
}

// named returns an empty object of the kind and name of a configuration.
func (k kind) named(c metav1.Object) client.Object {
	o := k.new()
	o.SetNamespace(c.GetNamespace())
	o.SetName(c.GetName())
	return o
}
