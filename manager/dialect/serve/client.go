package serve

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	kridge "github.com/ctrlmesh/ctrlmesh/api/kridge/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/origin"
)

// Reader reads objects of the dialects as ShardingConfigs, beside native ones. A Get reads an
// object of the kind that the given ShardingConfig has.
type Reader struct{ client.Reader }

// Get implements client.Reader.
func (r Reader) Get(ctx context.Context, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
	c, k, ok := ofDialect(o)
	if !ok {
		return r.Reader.Get(ctx, key, o, opts...)
	}
	object := k.new()
	if err := r.Reader.Get(ctx, key, object, opts...); err != nil {
		return err
	}
	into(c, object)
	return nil
}

// List implements client.Reader. A list of ShardingConfigs has the objects of all kinds.
func (r Reader) List(ctx context.Context, list client.ObjectList, opts ...client.ListOption) error {
	if err := r.Reader.List(ctx, list, opts...); err != nil {
		return err
	}
	configs, ok := list.(*v1alpha1.ShardingConfigList)
	if !ok {
		return nil
	}
	for _, gvk := range []schema.GroupVersionKind{origin.Kridge, origin.VirtualApp} {
		k := kinds[gvk]
		some := k.list()
		if err := r.Reader.List(ctx, some, opts...); err != nil {
			return fmt.Errorf("listing %s: %w", gvk.GroupKind(), err)
		}
		configs.Items = slices.Clip(configs.Items)
		k.items(some, func(o client.Object) {
			if o.GetLabels()[kridge.RootLabel] != "" {
				return // Kridge's own manager derived it, and it has no effect here
			}
			c, _, _ := Translate(gvk, o)
			configs.Items = append(configs.Items, *c)
		})
	}
	return nil
}

// Client also writes them: their statuses, and their finalizers by patches.
type Client struct{ client.Client }

func (c Client) reader() Reader { return Reader{c.Client} }

// Get implements client.Client.
func (c Client) Get(ctx context.Context, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
	return c.reader().Get(ctx, key, o, opts...)
}

// List implements client.Client.
func (c Client) List(ctx context.Context, list client.ObjectList, opts ...client.ListOption) error {
	return c.reader().List(ctx, list, opts...)
}

// Patch implements client.Client.
func (c Client) Patch(ctx context.Context, o client.Object, patch client.Patch, opts ...client.PatchOption) error {
	config, k, ok := ofDialect(o)
	if !ok {
		return c.Client.Patch(ctx, o, patch, opts...)
	}
	object := k.named(config)
	if err := c.Client.Patch(ctx, object, patch, opts...); err != nil {
		return err
	}
	into(config, object)
	return nil
}

// Update refuses to replace an object of a dialect, of which the ShardingConfig is a part only.
func (c Client) Update(ctx context.Context, o client.Object, opts ...client.UpdateOption) error {
	if config, _, ok := ofDialect(o); ok {
		return fmt.Errorf("updating %s %s/%s: it can be patched only", config.Kind, config.Namespace, config.Name)
	}
	return c.Client.Update(ctx, o, opts...)
}

// Status implements client.Client.
func (c Client) Status() client.SubResourceWriter { return statusWriter{c.Client.Status()} }

type statusWriter struct{ client.SubResourceWriter }

// Update implements client.SubResourceWriter. It conflicts if the object has changed.
func (w statusWriter) Update(ctx context.Context, o client.Object, opts ...client.SubResourceUpdateOption) error {
	config, k, ok := ofDialect(o)
	if !ok {
		return w.SubResourceWriter.Update(ctx, o, opts...)
	}
	// A merge patch would keep the fields that the new status omits.
	patch, err := json.Marshal([]map[string]any{
		{"op": "replace", "path": "/metadata/resourceVersion", "value": config.ResourceVersion},
		{"op": "add", "path": "/status", "value": config.Status},
	})
	if err != nil {
		return err
	}
	object := k.named(config)
	if err := w.Patch(ctx, object, client.RawPatch(types.JSONPatchType, patch)); err != nil {
		return err
	}
	into(config, object)
	return nil
}

// ofDialect returns a ShardingConfig that stands for an object of a dialect.
func ofDialect(o client.Object) (*v1alpha1.ShardingConfig, kind, bool) {
	c, ok := o.(*v1alpha1.ShardingConfig)
	if !ok {
		return nil, kind{}, false
	}
	k, ok := kinds[c.GroupVersionKind()]
	return c, k, ok
}

// into replaces a ShardingConfig by what an object of its kind stands for.
func into(c *v1alpha1.ShardingConfig, o client.Object) {
	next, _, _ := Translate(c.GroupVersionKind(), o)
	*c = *next
}
