package adoption

import (
	"fmt"
	"strings"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/snapshot"
	"github.com/ctrlmesh/ctrlmesh/manager/origin"
)

// Make returns a root for the workload that divides resources, written as group/resource, among shards.
// The pods of the workload are divided equally.
func Make(s *snapshot.Snapshot, r Request, shards int32, resources []string) (*unstructured.Unstructured, error) {
	var groups []any
	for _, text := range resources {
		group, resource, found := strings.Cut(text, "/")
		if !found {
			group, resource = "", text
		}
		if resource == "" || strings.Contains(resource, "/") {
			return nil, fmt.Errorf("invalid resource %q: write group/resource, such as example.com/foos", text)
		}
		groups = append(groups, map[string]any{"apiGroups": []any{group}, "resources": []any{resource}})
	}
	o := &unstructured.Unstructured{Object: map[string]any{
		"spec": map[string]any{"root": map[string]any{
			"prefix":           r.Target.Name,
			"targetRef":        map[string]any{"kind": r.Target.Kind, "name": r.Target.Name},
			"auto":             map[string]any{"shardingSize": int64(shards), "everyShardReplicas": int64(max(1, s.Subjects.Workload.Replicas/shards))},
			"resourceSelector": []any{map[string]any{"relateResources": groups}},
		}},
	}}
	o.SetGroupVersionKind(origin.Native)
	o.SetName(r.Target.Name)
	return o, nil
}
