package ui

import (
	"context"
	"fmt"
	"strings"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/answer"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/check"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/explain"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/operator"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/report"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/snapshot"
)

func (s *Server) overview(ctx context.Context, _ parameters) (string, any, error) {
	is, err := s.Reader.ReadAll(ctx, snapshot.Programs, snapshot.Configs(s.Namespace), snapshot.Members(s.Namespace))
	if err != nil {
		return "", nil, err
	}
	return "Overview", report.StatusOf(is), nil
}

// findings shows those of check, which says itself what it cannot read.
func (s *Server) findings(ctx context.Context, _ parameters) (string, any, error) {
	is, err := s.Reader.Read(ctx, check.Parts()...)
	if err != nil {
		return "", nil, err
	}
	return "Findings", check.Run(is), nil
}

// limits is what CircuitBreakers and FaultInjections do.
type limits struct {
	report.Breakers
	report.Faults
}

func (s *Server) limits(ctx context.Context, _ parameters) (string, any, error) {
	is, err := s.Reader.ReadAll(ctx, snapshot.Breakers(s.Namespace), snapshot.Faults(s.Namespace))
	if err != nil {
		return "", nil, err
	}
	return "Limits and faults", limits{report.BreakersOf(is, ""), report.FaultsOf(is)}, nil
}

// operatorView is what the page of an operator shows.
type operatorView struct {
	Is     report.Operator
	Report report.Shards
	// Heaviest is the greatest number of objects of a shard.
	Heaviest int64
	// Key is what the owner was asked of, and KeyKind how the root assigns keys; empty if it is none.
	Key, KeyKind string
	// Owner is the answer, and Writes what happens to writes now.
	Owner, Writes string
}

func (s *Server) operator(ctx context.Context, in parameters) (string, any, error) {
	namespace, name := in.path["namespace"], in.path["name"]
	is, err := s.Reader.ReadAll(ctx, snapshot.Configs(namespace), snapshot.Members(namespace))
	if err != nil {
		return "", nil, err
	}
	if err := s.Reader.Extend(ctx, is, snapshot.Locks); err != nil {
		return "", nil, err
	}
	config := is.Config(namespace, name)
	if config == nil {
		return "", nil, fmt.Errorf("%w: there is no ShardingConfig %s in namespace %s", errNoPage, name, namespace)
	}
	shards, err := report.ShardsOf(is, config)
	if err != nil {
		return "", nil, err
	}
	out := operatorView{Is: report.OperatorOf(config), Report: shards, Key: in.query.Get("key")}
	for _, one := range shards.Shards {
		if one.Objects != nil {
			out.Heaviest = max(out.Heaviest, *one.Objects)
		}
	}
	if config.Spec.Root != nil {
		s.owner(ctx, is, config, &out)
	}
	return name, out, nil
}

// owner looks up the owner of the key.
func (s *Server) owner(ctx context.Context, is *snapshot.Snapshot, c *v1alpha1.ShardingConfig, o *operatorView) {
	kind := operator.KeyOf(c)
	if o.KeyKind = strings.ToLower(string(kind)); kind == v1alpha1.KeyObject {
		o.KeyKind = "uid of an object"
	}
	if o.Key == "" {
		return
	}
	owner, err := answer.OwnerOf(ctx, s.Reader, is, c, report.Key{Namespace: o.Key, UID: o.Key, Cluster: o.Key})
	if o.Owner, o.Writes = owner.Summary, explain.DescribeWrites(owner.Writes); err != nil {
		o.Owner = err.Error()
	}
}
