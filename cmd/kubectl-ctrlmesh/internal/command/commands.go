package command

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/answer"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/report"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/snapshot"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
)

func (e *environment) statusCommand() *cobra.Command {
	c := &cobra.Command{Use: "status", Short: "Show the mesh and every operator on it", Args: cobra.NoArgs}
	wait := c.Flags().Bool("wait", false, "wait until all is healthy")
	timeout := c.Flags().Duration("timeout", 5*time.Minute, "how long to wait")
	c.RunE = e.connected(func(ctx context.Context, r snapshot.Reader, _ string, _ []string) error {
		status, err := e.status(ctx, r, *wait, *timeout)
		if err != nil {
			return err
		}
		return e.print(status, !status.Healthy)
	})
	return c
}

// status reads the status once, or until it is healthy or the time is over.
func (e *environment) status(ctx context.Context, r snapshot.Reader, wait bool, timeout time.Duration) (status report.Status, err error) {
	deadline, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	for {
		var s *snapshot.Snapshot
		s, err = r.ReadAll(ctx, snapshot.Programs, snapshot.Configs(""), snapshot.Members(""))
		if err == nil {
			status = report.StatusOf(s)
		}
		if err == nil && status.Healthy || !wait {
			return status, err
		}
		if !e.pause(deadline) {
			return status, cmp.Or(ctx.Err(), err)
		}
	}
}

func (e *environment) shardsCommand() *cobra.Command {
	c := &cobra.Command{Use: "shards ROOT", Short: "Show the shards of an operator", Args: cobra.ExactArgs(1)}
	c.RunE = func(c *cobra.Command, args []string) error {
		_, s, config, err := e.operator(c.Context(), args[0])
		if err != nil {
			return err
		}
		shards, err := report.ShardsOf(s, config)
		if err != nil {
			return err
		}
		return e.print(shards, shards.Findings())
	}
	return c
}

func (e *environment) ownerCommand() *cobra.Command {
	c := &cobra.Command{
		Use: "owner ROOT [NAMESPACE]", Short: "Show which shard owns a namespace, a cluster or an object", Args: cobra.RangeArgs(1, 2),
		Example: "  kubectl ctrlmesh owner operator-demo team-42\n  kubectl ctrlmesh owner fleet --cluster member-1\n  kubectl ctrlmesh owner by-object --uid 0a1b2c3d-0000-4000-8000-000000000000",
	}
	var key report.Key
	c.Flags().StringVar(&key.Cluster, "cluster", "", "name of a cluster, for roots with key: Cluster")
	c.Flags().StringVar(&key.UID, "uid", "", "uid of an object, for roots with key: Object")
	c.RunE = func(c *cobra.Command, args []string) error {
		var more []snapshot.Part
		if len(args) > 1 {
			key.Namespace = args[1]
			more = append(more, snapshot.Existence(key.Namespace))
		}
		r, s, config, err := e.operator(c.Context(), args[0], more...)
		if err != nil {
			return err
		}
		owner, err := answer.OwnerOf(c.Context(), r, s, config, key)
		if err != nil {
			return err
		}
		return e.print(owner, owner.Findings())
	}
	return c
}

// operator reads a configuration with its pods, and its Leases if that is permitted.
func (e *environment) operator(ctx context.Context, name string, more ...snapshot.Part) (r snapshot.Reader, s *snapshot.Snapshot, config *v1alpha1.ShardingConfig, err error) {
	r, namespace, err := e.connect()
	if err != nil {
		return r, nil, nil, err
	}
	s, err = r.ReadAll(ctx, append(more, snapshot.Configs(namespace), snapshot.Members(namespace))...)
	if err != nil {
		return r, nil, nil, err
	}
	if err := r.Extend(ctx, s, snapshot.Locks); err != nil {
		return r, nil, nil, err
	}
	config = s.Config(namespace, name)
	if config == nil {
		return r, nil, nil, fmt.Errorf("there is no ShardingConfig %s in namespace %s: name another namespace by -n, or see kubectl ctrlmesh status", name, namespace)
	}
	if compile.Derived(config) {
		return r, nil, nil, fmt.Errorf("ShardingConfig %s is a shard of root %s: name the root", name, config.Labels[v1alpha1.RootLabel])
	}
	return r, s, config, nil
}

func (e *environment) versionCommand() *cobra.Command {
	c := &cobra.Command{Use: "version", Short: "Show the versions of this program and of the mesh", Args: cobra.NoArgs}
	alone := c.Flags().Bool("client", false, "show the version of this program alone")
	c.RunE = func(c *cobra.Command, _ []string) error {
		var s *snapshot.Snapshot
		var failed error
		if !*alone {
			if r, _, err := e.connect(); err != nil {
				failed = err
			} else {
				s, failed = r.ReadAll(c.Context(), snapshot.Programs)
			}
		}
		if err := e.print(report.VersionOf(e.version, s), false); err != nil {
			return err
		}
		return failed
	}
	return c
}
