// Package command has the commands of the plugin: flags, connections and exit codes.
package command

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"k8s.io/cli-runtime/pkg/genericiooptions"

	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/render"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/snapshot"
)

// Exit codes.
const (
	// Healthy: nothing was found.
	Healthy = 0
	// Found: there are findings, or lint refuses an object.
	Found = 1
	// Unknown: the state cannot be read, or the command line is wrong.
	Unknown = 2
)

// errFound makes the program exit with Found, once the report is written.
var errFound = errors.New("there are findings")

// environment is what commands share.
type environment struct {
	genericiooptions.IOStreams
	version string
	flags   *genericclioptions.ConfigFlags
	output  string
	// meshNamespace is the namespace of the mesh.
	meshNamespace string
	// connect returns a reader, and the namespace of the command line.
	connect func() (snapshot.Reader, string, error)
	// poll is the time between two polls.
	poll time.Duration
	// warnings are those of the apiserver.
	warnings *warnings
}

// Run runs a command line, and returns its exit code.
func Run(ctx context.Context, streams genericiooptions.IOStreams, version string, args []string) int {
	return newEnvironment(streams, version).run(ctx, args)
}

func newEnvironment(streams genericiooptions.IOStreams, version string) *environment {
	e := &environment{IOStreams: streams, version: version, flags: genericclioptions.NewConfigFlags(false), poll: 2 * time.Second, warnings: &warnings{}}
	e.flags.ClusterName = nil // --cluster names a member cluster
	e.connect = e.dial
	return e
}

func (e *environment) run(ctx context.Context, args []string) int {
	c := e.root()
	c.SetArgs(args)
	c.SetIn(e.In)
	c.SetOut(e.Out)
	c.SetErr(e.ErrOut)
	err := c.ExecuteContext(ctx)
	switch {
	case err == nil:
		return Healthy
	case errors.Is(err, errFound):
		return Found
	case ctx.Err() != nil && errors.Is(err, context.Canceled):
		err = errors.New("interrupted")
	}
	fmt.Fprintf(e.ErrOut, "error: %v\n", err)
	return Unknown
}

func (e *environment) root() *cobra.Command {
	c := &cobra.Command{
		Use:           "kubectl-ctrlmesh",
		Short:         "Show what the mesh does, and put operators on it",
		Long:          "Show what the mesh does, from the objects of the API, and put operators on it. Commands that only show something work while no manager runs.\n\nExit codes: 0 healthy, 1 findings, 2 unknown: the state cannot be read.",
		SilenceErrors: true, SilenceUsage: true,
		Annotations: map[string]string{cobra.CommandDisplayNameAnnotation: "kubectl ctrlmesh"},
		PersistentPreRunE: func(*cobra.Command, []string) error {
			return render.Check(e.output)
		},
	}
	e.flags.AddFlags(c.PersistentFlags())
	c.PersistentFlags().StringVarP(&e.output, "output", "o", "table", "table, json or yaml")
	c.PersistentFlags().StringVar(&e.meshNamespace, "mesh-namespace", snapshot.DefaultNamespace, "namespace of the mesh")
	c.AddCommand(e.statusCommand(), e.shardsCommand(), e.ownerCommand(), e.explainCommand(), e.checkCommand(), e.lintCommand(), e.planCommand(), e.adviseCommand(), e.migrateCommand(), e.sysdumpCommand(), e.upgradeCommand(), e.uiCommand(), e.versionCommand())
	c.AddCommand(e.adoptCommand(), e.removeCommand(), e.tapCommand(), e.costCommand(), e.breakerCommand(), e.faultsCommand())
	showUsage(c.Commands())
	return c
}

// connected returns what a command does with a reader, the namespace of the command line and its arguments.
func (e *environment) connected(do func(ctx context.Context, r snapshot.Reader, namespace string, args []string) error) func(*cobra.Command, []string) error {
	return func(c *cobra.Command, args []string) error {
		r, namespace, err := e.connect()
		if err != nil {
			return err
		}
		return do(c.Context(), r, namespace, args)
	}
}

// showUsage has errors about the arguments of commands show how the commands are used.
func showUsage(commands []*cobra.Command) {
	for _, c := range commands {
		showUsage(c.Commands())
		if check := c.Args; check != nil {
			c.Args = func(c *cobra.Command, args []string) error {
				if err := check(c, args); err != nil {
					return fmt.Errorf("%w: usage: %s", err, c.UseLine())
				}
				return nil
			}
		}
	}
}

// print writes a report. It returns errFound if the report has findings.
func (e *environment) print(r render.Report, findings bool) error {
	if err := render.Write(e.Out, e.output, r); err != nil {
		return fmt.Errorf("writing the report: %w", err)
	}
	if findings {
		return errFound
	}
	return nil
}
