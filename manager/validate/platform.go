package validate

import (
	"fmt"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/label"
	"github.com/ctrlmesh/ctrlmesh/manager/platform"
)

// permitted returns a message if a configuration exceeds a setting of the administrator. The
// settings are in the mesh's namespace.
func permitted(c *v1alpha1.ShardingConfig, s *platform.Settings, meshNamespace string) string {
	exceeds := func(setting, format string, args ...any) string {
		return fmt.Sprintf(format, args...) + fmt.Sprintf(": %s of ConfigMap %s/%s excludes it; ask the administrator of the mesh", setting, meshNamespace, platform.ConfigMap)
	}
	if !s.ConfigsIn(c.Namespace) {
		return exceeds(platform.ShardingNamespaces, "metadata.namespace: namespace %s may have no ShardingConfig", c.Namespace)
	}
	for _, l := range label.Limits(c) {
		for _, gr := range label.Resources(l.RelateResources) {
			if !s.Divides(gr) {
				return exceeds(platform.ShardingExcludedResources, "%s may not be divided", gr)
			}
			if label.Needed(c, l) && !s.Stamps(gr) {
				return exceeds(platform.StampingExcludedResources, "%s may not be divided by the mesh's labels, because its objects are not stamped", gr)
			}
		}
		for _, namespace := range namespacesOf(l.Selector) {
			if namespace == meshNamespace || !s.StampsIn(namespace) {
				return exceeds(platform.StampingExcludedNamespaces, "objects of namespace %s may not be selected by label %s, because they are not stamped", namespace, v1alpha1.NamespaceLabel)
			}
		}
	}
	return ""
}

// namespacesOf returns the namespaces that a selector requires by label.
func namespacesOf(s *metav1.LabelSelector) (out []string) {
	if s == nil {
		return nil
	}
	if namespace, ok := s.MatchLabels[v1alpha1.NamespaceLabel]; ok {
		out = append(out, namespace)
	}
	for _, e := range s.MatchExpressions {
		if e.Key == v1alpha1.NamespaceLabel && e.Operator == metav1.LabelSelectorOpIn {
			out = slices.Concat(out, e.Values)
		}
	}
	return out
}
