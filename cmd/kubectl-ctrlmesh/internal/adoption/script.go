package adoption

import (
	"fmt"
	"strings"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/render"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/snapshot"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
)

// Script is what a command would do, for a shell.
type Script struct {
	Workload string    `json:"workload"`
	Steps    []Command `json:"steps"`
}

// Command is a step as commands for a shell.
type Command struct {
	What    string `json:"what"`
	Command string `json:"command"`
}

// WriteText implements render.Report.
func (p Script) WriteText(t *render.Text) {
	for i, c := range p.Steps {
		t.Line("# %d. %s", i+1, c.What)
		t.Line("%s", strings.TrimSuffix(c.Command, "\n"))
	}
	if len(p.Steps) == 0 {
		t.Line("# nothing is left to do for %s", p.Workload)
	}
}

func (p *Script) add(what, format string, args ...any) {
	p.Steps = append(p.Steps, Command{what, fmt.Sprintf(format, args...)})
}

// LabelPatch returns the merge patch that sets or removes the label of the mesh on a pod template.
func LabelPatch(set bool) []byte {
	value := "null"
	if set {
		value = `"true"`
	}
	return fmt.Appendf(nil, `{"spec":{"template":{"metadata":{"labels":{%q:%s}}}}}`, v1alpha1.EnableProxyLabel, value)
}

// AdoptScript returns the steps that are left of an adoption. manifest is the root in YAML. Without
// problems, all of it can be done.
func AdoptScript(s *snapshot.Snapshot, r Request, manifest string) Script {
	v := r.view(s)
	p := Script{Workload: r.Target.String(), Steps: []Command{}}
	if Adopt(s, r).Kind == Done {
		return p
	}
	root := v.root
	if root == nil {
		root = r.Wanted
		effect := "Its pods are outside the mesh, so nothing changes yet."
		if v.labelled() == nil {
			effect = "Its pods are on the mesh already, and the manager replaces them one by one."
		}
		p.add("Create the root. "+effect, "kubectl create -f - <<'EOF'\n%sEOF", manifest)
	}
	if v.labelled() != nil {
		p.add("Label the pod template. New pods are on the mesh, in standby.", "kubectl -n %s patch %s --type=merge -p '%s'", r.Namespace, r.Target.Argument(), LabelPatch(true))
	}
	v.addRollout(&p, true)
	p.add("Wait until each shard has its keys.", "kubectl -n %s wait --for=condition=Ready --timeout=10m shardingconfig/%s", r.Namespace, root.Name)
	p.add("See the leader of each shard.", "kubectl ctrlmesh shards %s -n %s", root.Name, r.Namespace)
	return p
}

// RemoveScript returns the steps that are left of a removal.
func RemoveScript(s *snapshot.Snapshot, r Request) Script {
	v := r.view(s)
	p := Script{Workload: r.Target.String(), Steps: []Command{}}
	if v.root != nil {
		p.add("Delete the root. The command ends when the locks are released and the members are replaced.", "kubectl -n %s delete shardingconfig %s", r.Namespace, v.root.Name)
	}
	if v.workload == nil {
		return p
	}
	if v.unlabelled() != nil {
		p.add("Remove the label from the pod template.", "kubectl -n %s patch %s --type=merge -p '%s'", r.Namespace, r.Target.Argument(), LabelPatch(false))
	}
	v.addRollout(&p, false)
	return p
}

// addRollout adds the replacement of pods, if some are left to replace.
func (v view) addRollout(p *Script, onMesh bool) {
	if v.rollout(onMesh) == nil {
		return
	}
	var old []string
	for i := range v.workload.Pods {
		if pod := &v.workload.Pods[i]; compile.Labelled(pod) != onMesh {
			old = append(old, pod.Name)
		}
	}
	if _, do := v.heldBack(old); do != "" {
		p.add("Let the pods be replaced, which the workload does not do by itself.", "%s", do)
	}
	if !v.workload.OnDelete {
		p.add("Wait until the pods are replaced.", "kubectl -n %s rollout status %s", v.Namespace, v.Target.Argument())
	}
}
