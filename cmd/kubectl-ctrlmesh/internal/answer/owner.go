package answer

import (
	"context"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/explain"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/render"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/report"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/snapshot"
)

// Owner is the owner of a key, and what happens to writes of the operator's pods now.
type Owner struct {
	report.Owner
	Writes []explain.Write `json:"writes,omitempty"`
}

// WriteText implements render.Report.
func (o Owner) WriteText(t *render.Text) {
	o.Owner.WriteText(t)
	if text := explain.DescribeWrites(o.Writes); text != "" {
		t.Line("%s", text)
	}
}

// OwnerOf returns the owner of a key, from a snapshot with the members and locks of a root. What happens to
// writes needs more: without permission to read that, it is left out.
func OwnerOf(ctx context.Context, r snapshot.Reader, s *snapshot.Snapshot, c *v1alpha1.ShardingConfig, key report.Key) (Owner, error) {
	owner, err := report.OwnerOf(s, c, key)
	if err != nil {
		return Owner{}, err
	}
	more := append(rulesIn(c.Namespace), snapshot.Programs, snapshot.Settings, snapshot.Namespaces)
	if err := r.Extend(ctx, s, more...); err != nil {
		return Owner{}, err
	}
	for _, part := range more {
		if !s.Has(part) {
			return Owner{Owner: owner}, nil
		}
	}
	return Owner{owner, explain.Writes(s, c, key.Namespace)}, nil
}

// rulesIn are the rules of traffic of a namespace.
func rulesIn(namespace string) []snapshot.Part {
	return []snapshot.Part{snapshot.Breakers(namespace), snapshot.Faults(namespace), snapshot.TrafficPolicies(namespace)}
}
