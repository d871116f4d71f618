package command

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/yaml"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/adoption"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/lint"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/plan"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/report"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/snapshot"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
	"github.com/ctrlmesh/ctrlmesh/manager/origin"
)

// walkTimeout is how long adopt and remove wait by default.
const walkTimeout = 10 * time.Minute

// rootFlags say which root an adoption creates.
type rootFlags struct {
	file      string
	shards    int32
	resources []string
}

func (f rootFlags) any() bool { return f.file != "" || f.shards != 0 || len(f.resources) > 0 }

// check returns an error if the flags contradict each other.
func (f rootFlags) check() error {
	switch made := f.shards != 0 || len(f.resources) > 0; {
	case f.file != "" && made:
		return errors.New("-f excludes --shards and --resources: name the root by one of them")
	case made && (f.shards < 1 || len(f.resources) == 0):
		return errors.New("a root needs a positive number of --shards, and --resources to divide: name both")
	}
	return nil
}

func (e *environment) adoptCommand() *cobra.Command {
	c := &cobra.Command{
		Use: "adopt KIND/NAME", Short: "Put a running operator on the mesh, step by step", Args: cobra.ExactArgs(1),
		Long:    "Put the operator of a StatefulSet or a Deployment on the mesh: check what it needs, create its ShardingConfig, label its pod template, and wait until each shard has a leader. Run again, it goes on where it was.",
		Example: "  kubectl ctrlmesh adopt statefulset/operator-demo -f root.yaml --dry-run\n  kubectl ctrlmesh adopt deployment/operator-demo --shards 2 --resources example.com/foos",
	}
	var flags rootFlags
	c.Flags().StringVarP(&flags.file, "filename", "f", "", "file with the ShardingConfig; - for the standard input")
	c.Flags().Int32Var(&flags.shards, "shards", 0, "number of shards, to have a ShardingConfig made")
	c.Flags().StringSliceVar(&flags.resources, "resources", nil, "what the shards divide, as group/resource; without a group for the core group")
	dryRun := c.Flags().Bool("dry-run", false, "check all, change nothing, and print the commands that do the same")
	timeout := c.Flags().Duration("timeout", walkTimeout, "how long to wait")
	c.RunE = func(c *cobra.Command, args []string) error {
		target, err := adoption.ParseTarget(args[0])
		if err == nil {
			err = flags.check()
		}
		if err != nil {
			return err
		}
		r, namespace, err := e.connect()
		if err != nil {
			return err
		}
		request := adoption.Request{Namespace: namespace, Target: target}
		w := &walk{progress: progress{environment: e}, reader: r, request: request, next: adoption.Adopt, timeout: *timeout, again: "the same command"}
		return w.adopt(c.Context(), flags, *dryRun)
	}
	return c
}

// adopt checks what an adoption needs, and takes its steps.
func (w *walk) adopt(ctx context.Context, flags rootFlags, dryRun bool) error {
	s, err := w.read(ctx)
	if err != nil {
		return err
	}
	if s.Subjects.Workload == nil {
		return fmt.Errorf("there is no %s in namespace %s: name another namespace by -n", w.request.Target, w.request.Namespace)
	}
	var manifest string
	var problems []string
	if flags.any() {
		if manifest, problems, err = w.want(ctx, s, flags); err != nil {
			return err
		}
	}
	unknown, err := w.unknown(s)
	if err != nil {
		return err
	}
	if problems = slices.Concat(problems, adoption.Problems(s, w.request), unknown); len(problems) == 0 {
		problems, err = w.tries(ctx, s, adoption.Adoptions(s, w.request))
	}
	if err != nil {
		return err
	}
	if len(problems) > 0 {
		return w.refused(problems)
	}
	if dryRun {
		return w.print(adoption.AdoptScript(s, w.request, manifest), false)
	}
	status, changes := report.StatusOf(s), "nothing is left to change"
	if len(adoption.Adoptions(s, w.request)) > 0 {
		changes = "the apiserver accepts all changes"
	}
	w.say("checked", fmt.Sprintf("manager %d/%d ready, agents %d/%d ready; %s", status.Manager.Ready, status.Manager.Replicas, status.Agents.Ready, len(status.Agents.Nodes), changes))
	result, s, err := w.run(ctx)
	if err != nil {
		return err
	}
	if result.Done {
		root := w.request.Root(s)
		result.Leaders = adoption.Leaders(s, root)
		result.Summary = fmt.Sprintf("%s is adopted by ShardingConfig %s: %d shards; leaders: %s", w.request.Target, root.Name, root.Status.Shards, cmp.Or(strings.Join(result.Leaders, ", "), "none, because the mesh knows no lock of the operator"))
	}
	return w.print(result, !result.Done)
}

// unknown returns a problem for each resource of the root that the apiserver does not serve. Admission
// accepts such a root, but its shards do nothing until the resource is served.
func (w *walk) unknown(s *snapshot.Snapshot) ([]string, error) {
	root := cmp.Or(w.request.Wanted, w.request.Root(s))
	if root == nil {
		return nil, nil
	}
	lists, _, err := w.reader.Served()
	if err != nil {
		return nil, err
	}
	_, problems := plan.Resources(lists, root)
	return problems, nil
}

// want sets the root that the flags describe, with its defaults. It returns the root in YAML, and what
// admission would refuse.
func (w *walk) want(ctx context.Context, s *snapshot.Snapshot, flags rootFlags) (manifest string, problems []string, err error) {
	var o *unstructured.Unstructured
	if flags.file != "" {
		o, err = w.rootOf(flags.file)
	} else {
		o, err = adoption.Make(s, w.request, flags.shards, flags.resources)
	}
	if err != nil {
		return "", nil, err
	}
	if in := o.GetNamespace(); in != "" && in != w.request.Namespace {
		return "", nil, fmt.Errorf("the ShardingConfig is in namespace %s, and the command in %s: name one namespace by -n", in, w.request.Namespace)
	}
	o.SetNamespace(w.request.Namespace)
	text, err := yaml.Marshal(o.Object)
	if err != nil {
		return "", nil, fmt.Errorf("encoding the ShardingConfig: %w", err)
	}
	root, problems, err := w.admitted(ctx, flags.file, o)
	if err != nil {
		return "", nil, err
	}
	if root.Spec.Root == nil || layout.Target(root.Spec.Root) != w.request.Target {
		return "", nil, fmt.Errorf("ShardingConfig %s does not name %s: correct the target in spec.root, or the command line", root.Name, w.request.Target)
	}
	w.request.Wanted = root
	return string(text), problems, nil
}

// admitted returns a ShardingConfig with its defaults, and what admission would refuse.
func (e *environment) admitted(ctx context.Context, file string, o *unstructured.Unstructured) (c *v1alpha1.ShardingConfig, problems []string, err error) {
	result, err := lint.Run(ctx, []lint.Document{{File: file, Number: 1, Objects: []*unstructured.Unstructured{o}}}, o.GetNamespace(), e.meshNamespace) // it sets the defaults
	if err != nil {
		return nil, nil, err
	}
	for _, p := range result.Problems {
		if p.Level == lint.Refused {
			problems = append(problems, fmt.Sprintf("ShardingConfig %s: %s", o.GetName(), p.Text()))
		}
	}
	c = &v1alpha1.ShardingConfig{}
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(o.Object, c); err != nil {
		return nil, nil, fmt.Errorf("reading the ShardingConfig: %w: correct it as kubectl ctrlmesh lint says", err)
	}
	return c, problems, nil
}

// rootOf reads the ShardingConfig of a file, which has nothing else.
func (e *environment) rootOf(file string) (*unstructured.Unstructured, error) {
	found, err := e.objects(file)
	if err != nil {
		return nil, err
	}
	if len(found) != 1 || found[0].GroupVersionKind() != origin.Native {
		return nil, fmt.Errorf("%s must contain one ShardingConfig of %s and nothing else: apply other objects by kubectl", file, origin.Native.GroupVersion())
	}
	return found[0], nil
}
