// Package dialect translates the custom resources of the mesh's ancestors to the native kinds,
// which the manager then treats like objects that users wrote.
//
// It is pure. Its results depend on its arguments alone.
package dialect

import (
	"fmt"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
)

// Translation is the native form of an object. It shares no memory with that object.
type Translation struct {
	// Config is nil if the object is translated to Breakers.
	Config *v1alpha1.ShardingConfig
	// Breakers have distinct names and uids. Those of one name and uid have equal specs as long
	// as the generation of the object does not change.
	Breakers []*v1alpha1.CircuitBreaker
	// Warnings say what has no effect, or another effect than in the ancestor.
	Warnings []string
	// Remainder names the parts that native objects cannot express, and that have no effect.
	Remainder []string
}

func (t *Translation) warn(path *field.Path, format string, args ...any) {
	t.Warnings = append(t.Warnings, path.String()+": "+fmt.Sprintf(format, args...))
}

func (t *Translation) lacks(path *field.Path, format string, args ...any) {
	t.Remainder = append(t.Remainder, path.String()+": "+fmt.Sprintf(format, args...))
}

// newConfig returns a configuration with the metadata of another object, and the values that
// the schema sets by default.
func newConfig(meta metav1.ObjectMeta) *v1alpha1.ShardingConfig {
	return &v1alpha1.ShardingConfig{
		TypeMeta:   metav1.TypeMeta{APIVersion: v1alpha1.GroupVersion.String(), Kind: "ShardingConfig"},
		ObjectMeta: *meta.DeepCopy(),
		Spec: v1alpha1.ShardingConfigSpec{
			FailurePolicy: v1alpha1.FailClosed, TokenBinding: v1alpha1.TokenBindingEnforce,
			ClientCertificates: v1alpha1.ClientCertificatesRefuse, Isolation: v1alpha1.IsolationEnforce,
			Reads: v1alpha1.ReadsAll, Fence: v1alpha1.FenceResources,
		},
	}
}

// newRoot returns a root with the values that the schema sets by default.
func newRoot(prefix string) *v1alpha1.RootConfig {
	return &v1alpha1.RootConfig{
		Prefix: prefix, Key: v1alpha1.KeyNamespace, Method: v1alpha1.MethodAuto, OnChange: v1alpha1.OnChangeRestart,
		ClusterScoped: v1alpha1.ClusterScopedEveryone,
	}
}

// lockOf returns the operator's lock by either spelling, nil for none.
func lockOf(name string, election *string, path *field.Path) (*v1alpha1.ControllerConfig, field.ErrorList) {
	switch {
	case election == nil && name == "":
		return nil, nil
	case election == nil:
		return &v1alpha1.ControllerConfig{LeaderElectionName: name}, nil
	case name != "":
		return nil, field.ErrorList{field.Forbidden(path, "leaderElectionName and leaderElection.lockName both name the lock: set one of them")}
	case *election == "":
		return nil, field.ErrorList{field.Required(path.Child("leaderElection", "lockName"), "name the lock")}
	}
	return &v1alpha1.ControllerConfig{LeaderElectionName: *election}, nil
}

// webhookOf returns where the operator serves webhooks.
func webhookOf(certDir string, port int32, path *field.Path) (*v1alpha1.WebhookConfig, field.ErrorList) {
	var errs field.ErrorList
	if certDir == "" {
		errs = append(errs, field.Required(path.Child("certDir"), "name the directory of the webhook server's certificate"))
	}
	if port < 1 || port > 65535 {
		errs = append(errs, field.Invalid(path.Child("port"), port, "must be from 1 to 65535"))
	}
	return &v1alpha1.WebhookConfig{CertDir: certDir, Port: port}, errs
}

// empty reports whether a selector requires nothing.
func empty(s *metav1.LabelSelector) bool {
	return s == nil || len(s.MatchLabels)+len(s.MatchExpressions) == 0
}

// selects returns the errors of a selector.
func selects(s *metav1.LabelSelector, path *field.Path) field.ErrorList {
	if _, err := metav1.LabelSelectorAsSelector(s); err != nil {
		return field.ErrorList{field.Invalid(path, metav1.FormatLabelSelector(s), err.Error())}
	}
	return nil
}

// aloneStar returns the error of a list that has "*" beside other values.
func aloneStar(values []string, path *field.Path) field.ErrorList {
	if len(values) > 1 && slices.Contains(values, "*") {
		return field.ErrorList{field.Invalid(path, values, `"*" must be alone in its list`)}
	}
	return nil
}

// checked returns the errors of the native root that a translation without errors has. Their
// paths are those of the native object.
func checked(c *v1alpha1.ShardingConfig, errs field.ErrorList) field.ErrorList {
	if len(errs) > 0 || c.Spec.Root == nil {
		return errs
	}
	return layout.Validate(c.Spec.Root, field.NewPath("spec", "root"))
}
