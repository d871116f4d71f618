package lint

import (
	"encoding/json"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	kridge "github.com/ctrlmesh/ctrlmesh/api/kridge/v1alpha1"
	kruise "github.com/ctrlmesh/ctrlmesh/api/kruise/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/dialect/serve"
	"github.com/ctrlmesh/ctrlmesh/manager/origin"
	"github.com/ctrlmesh/ctrlmesh/manager/platform"
	"github.com/ctrlmesh/ctrlmesh/manager/validate"
)

// kind is how admission checks objects of a kind.
type kind struct {
	definition string // the file of deploy/crd
	// read returns the errors of an object, and the ShardingConfig that it is or stands for; nil if
	// there is none.
	read func(gvk schema.GroupVersionKind, namespace string, raw []byte) (*v1alpha1.ShardingConfig, field.ErrorList, error)
	// webhook returns the webhook of the manager, which knows the objects that were applied before.
	webhook func(*linter) admission.Handler
}

var kinds = map[schema.GroupVersionKind]kind{
	origin.Native:     {v1alpha1.GroupName + "_shardingconfigs", config, configs},
	origin.Kridge:     {kridge.GroupName + "_shardingconfigs", translated, configs},
	origin.VirtualApp: {kruise.GroupName + "_virtualapps", translated, configs},
	v1alpha1.GroupVersion.WithKind("CircuitBreaker"): {
		v1alpha1.GroupName + "_circuitbreakers", traffic(validate.Breaker),
		func(l *linter) admission.Handler { return &validate.Breakers{Reader: l.applied} },
	},
	v1alpha1.GroupVersion.WithKind("FaultInjection"): {
		v1alpha1.GroupName + "_faultinjections", traffic(validate.Injection),
		func(l *linter) admission.Handler { return &validate.Injections{Reader: l.applied} },
	},
	kruise.GroupVersion.WithKind("TrafficPolicy"): {
		kruise.GroupName + "_trafficpolicies", unread,
		func(l *linter) admission.Handler { return serve.PolicyWebhook{Reader: l.applied} },
	},
}

// config reads a ShardingConfig of the mesh's own.
func config(_ schema.GroupVersionKind, _ string, raw []byte) (*v1alpha1.ShardingConfig, field.ErrorList, error) {
	c := &v1alpha1.ShardingConfig{}
	if err := json.Unmarshal(raw, c); err != nil {
		return nil, nil, err
	}
	return c, validate.Config(c), nil
}

// translated reads an object of a dialect that stands for a ShardingConfig.
func translated(gvk schema.GroupVersionKind, namespace string, raw []byte) (*v1alpha1.ShardingConfig, field.ErrorList, error) {
	c, _, errs, err := serve.Decode(gvk, namespace, raw)
	if err == nil && len(errs) == 0 {
		errs = validate.Config(c)
	}
	return c, errs, err
}

// traffic returns a function that reads an object that is no ShardingConfig.
func traffic[O any](check func(*O) field.ErrorList) func(schema.GroupVersionKind, string, []byte) (*v1alpha1.ShardingConfig, field.ErrorList, error) {
	return func(_ schema.GroupVersionKind, _ string, raw []byte) (*v1alpha1.ShardingConfig, field.ErrorList, error) {
		o := new(O)
		if err := json.Unmarshal(raw, o); err != nil {
			return nil, nil, err
		}
		return nil, check(o), nil
	}
}

// unread leaves an object to its webhook.
func unread(schema.GroupVersionKind, string, []byte) (*v1alpha1.ShardingConfig, field.ErrorList, error) {
	return nil, nil, nil
}

// configs returns the webhook of all kinds of ShardingConfigs.
func configs(l *linter) admission.Handler {
	return &validate.Webhook{Reader: l.applied, Manager: manager, Namespace: l.mesh, Settings: func() *platform.Settings { return l.settings }, Translate: serve.Decode}
}
