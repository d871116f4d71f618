package advise

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/render"
	"github.com/ctrlmesh/ctrlmesh/internal/clip"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/manager/resources"
	"github.com/ctrlmesh/ctrlmesh/proxy/isolation"
)

const (
	// again is how many writes of one object show that an operator writes it over and over.
	again = 3
	// maxNamed bounds how many objects or resources a line names.
	maxNamed = 3
	// enough is how many requests a verdict needs.
	enough = 20
)

// Verdicts.
const (
	Divisible = "can be divided by namespace"
	ByObject  = "can be divided by object, not by namespace"
	Pointless = "is not worth dividing"
	Unseen    = "is not known well enough"
)

// Input is what a verdict follows from.
type Input struct {
	*Profile
	// Namespace of the operator.
	Namespace string
	// Workload is the operator's, as a command line names it.
	Workload string
	// Root is the name of the root that divides it already; empty if none does.
	Root string
	// Served is what the apiserver serves.
	Served *resources.Served
}

// Advice is whether an operator can be divided.
type Advice struct {
	Verdict string `json:"verdict"`
	// Because says why, unless the operator can be divided by namespace.
	Because string `json:"because,omitempty"`
	Seen    string `json:"seen"`
	// Divide are the resources to divide, as group/resource.
	Divide []string `json:"divide"`
	// Locks are the Leases that the operator renewed, as namespace/name.
	Locks []string `json:"locks"`
	// Risks say what each shard would do, or not see.
	Risks []string `json:"risks"`
	// Next is what to run next.
	Next string `json:"next,omitempty"`
}

// Findings reports whether the operator cannot, or should not, be divided by namespace.
func (a Advice) Findings() bool { return a.Verdict != Divisible }

// WriteText implements render.Report.
func (a Advice) WriteText(t *render.Text) {
	line := func(key, text string) {
		if text != "" {
			t.Line("%-7s  %s", key, text)
		}
	}
	line("VERDICT", strings.TrimSuffix(a.Verdict+": "+a.Because, ": "))
	line("SEEN", a.Seen)
	line("DIVIDE", strings.Join(a.Divide, ", "))
	line("LOCK", strings.Join(a.Locks, ", "))
	for _, r := range a.Risks {
		line("RISK", r)
	}
	line("NEXT", a.Next)
}

// evaluation is Advice in the making.
type evaluation struct {
	Input
	Advice
	divided []schema.GroupResource // sorted
	global  []schema.GroupResource // without namespace, and written; sorted
	// tenants are the writes of divided resources by namespace, without the operator's own. others are
	// those in namespaces that are not known by name.
	tenants map[string]int
	others  int
}

// Evaluate reports whether an operator can be divided.
func Evaluate(in Input) Advice {
	j := &evaluation{Input: in, Advice: Advice{Divide: []string{}, Locks: in.locks(), Risks: []string{}}, tenants: map[string]int{}}
	j.sort()
	j.Seen = fmt.Sprintf("%s of %s in %s", render.Count(in.Requests, "request"), render.Count(len(in.Pods), "pod"), j.watched())
	if in.Events > 0 {
		j.Seen += fmt.Sprintf(", %s of watches, %s of other responses", render.Count(in.Events, "event"), render.Size(float64(in.Bytes)))
	}
	j.decide()
	if j.Verdict == Divisible || j.Verdict == ByObject {
		j.risks()
	}
	if j.Verdict == Divisible {
		for _, r := range j.divided {
			j.Divide = append(j.Divide, strings.TrimPrefix(r.Group+"/"+r.Resource, "/"))
		}
	}
	j.Next = j.next()
	return j.Advice
}

// watched returns for how long requests were seen.
func (j *evaluation) watched() time.Duration { return j.Last.Sub(j.First).Round(time.Second) }

// next returns the next command; empty if there is none.
func (j *evaluation) next() string {
	switch {
	case j.Root != "":
		return fmt.Sprintf("kubectl ctrlmesh shards %s -n %s", j.Root, j.Namespace)
	case j.Verdict == Divisible:
		return fmt.Sprintf("kubectl ctrlmesh adopt %s -n %s --shards 2 --resources %s --dry-run", j.Workload, j.Namespace, strings.Join(j.Divide, ","))
	}
	return ""
}

// sort finds the resources that shards would divide, and those that no namespace divides.
func (j *evaluation) sort() {
	for r, u := range j.uses {
		kind, served := j.Served.Kinds[r]
		switch {
		case !served || !isolation.Contended(r):
		case !kind.Namespaced && u.writes > 0:
			j.global = append(j.global, r)
		case kind.Namespaced && (u.wide || u.beyond(j.Namespace)):
			j.divided = append(j.divided, r)
			j.others += u.others
			for namespace, n := range u.namespaces {
				if namespace != j.Namespace {
					j.tenants[namespace] += n
				}
			}
		}
	}
	byName := func(a, b schema.GroupResource) int { return strings.Compare(a.String(), b.String()) }
	slices.SortFunc(j.divided, byName)
	slices.SortFunc(j.global, byName)
}

func (j *evaluation) decide() {
	switch {
	case j.Requests < enough:
		j.Verdict, j.Because = Unseen, fmt.Sprintf("it needs at least %d requests: let it work for longer, and restart a pod meanwhile", enough)
	case len(j.divided) == 0 && len(j.global) > 0:
		j.Verdict, j.Because = ByObject, fmt.Sprintf("it writes %s, which are in no namespace: see spec.root.key: Object", named(j.global))
	case len(j.divided) == 0:
		j.Verdict, j.Because = Pointless, fmt.Sprintf("it watches no resource of all namespaces, and writes in namespace %s alone", j.Namespace)
	case len(j.tenants) == 0 && j.others == 0:
		j.Verdict, j.Because = Unseen, "it wrote nothing in other namespaces than its own: watch it while it works"
	case len(j.tenants) == 1 && j.others == 0:
		j.Verdict, j.Because = Pointless, fmt.Sprintf("all its writes are in namespace %s", slices.Collect(maps.Keys(j.tenants))[0])
	default:
		j.Verdict = Divisible
	}
}

// risks says what is to be known before the operator is divided.
func (j *evaluation) risks() {
	for _, r := range j.global {
		j.risk("writes %s, which are in no namespace (%d writes): every shard will write them, unless spec.root.clusterScoped says otherwise", r, j.uses[r].writes)
	}
	for _, r := range j.divided {
		if j.uses[r].indivisible {
			j.risk("lists or watches %s in encodings that the mesh cannot divide, and would be refused (406): have it accept JSON or Kubernetes protobuf, or set spec.root.method to Labels", r)
		}
		if conflicts := j.uses[r].conflicts; conflicts*100 > j.uses[r].writes {
			j.risk("%d writes of %s conflicted: somebody else, or another of its controllers, writes these objects, too", conflicts, r)
		}
	}
	j.crossings()
	j.singletons()
	if total, heaviest := j.heaviest(); j.Verdict == Divisible && j.tenants[heaviest]*2 > total {
		j.risk("%d %% of the writes are in namespace %s: one shard will have them all", j.tenants[heaviest]*100/total, heaviest)
	}
	if len(j.Locks) == 0 {
		j.risk("it renewed no Lease in %s: if it elects no leader, a shard may have one pod alone; if it elects one by other objects, see spec.controller.locks", j.watched())
	}
	if j.Refused > 0 {
		j.risk("the apiserver refused %d requests (403): it may lack permissions, and do more with them", j.Refused)
	}
}

// crossings finds namespaces where most writes of a resource seem to have causes in others.
func (j *evaluation) crossings() {
	for _, r := range j.divided {
		u := j.uses[r]
		var namespaces, causes []string
		crossing, all := 0, 0
		for _, namespace := range slices.Sorted(maps.Keys(u.namespaces)) {
			n, by := u.crossing(namespace)
			if n < again || n*2 <= u.namespaces[namespace] {
				continue
			}
			namespaces, causes = append(namespaces, namespace), append(causes, by...)
			crossing, all = crossing+n, all+u.namespaces[namespace]
		}
		if len(namespaces) == 0 {
			continue
		}
		slices.Sort(causes)
		j.risk("writes %s in %s after changes of %s in other namespaces (%d of %d writes): only the shard of a namespace may write there; if each shard must, list these objects in spec.root.shared with writes: Everyone",
			r, clip.Join(namespaces, maxNamed, ", "), clip.Join(slices.Compact(causes), maxNamed, ", "), crossing, all)
	}
}

// singletons finds objects in the operator's own namespace that it writes over and over.
func (j *evaluation) singletons() {
	var found []string
	for r, u := range j.uses {
		if !isolation.Contended(r) {
			continue
		}
		for o, n := range u.objects {
			if o.namespace == j.Namespace && n >= again {
				found = append(found, r.String()+" "+o.name)
			}
		}
	}
	if len(found) > 0 {
		slices.Sort(found)
		j.risk("rewrites %s in its own namespace, where one shard alone may write: if each shard must, list it in spec.root.shared with writes: Everyone", clip.Join(found, maxNamed, ", "))
	}
}

func (j *evaluation) heaviest() (total int, namespace string) {
	total = j.others
	for _, name := range slices.Sorted(maps.Keys(j.tenants)) {
		total += j.tenants[name]
		if j.tenants[name] > j.tenants[namespace] {
			namespace = name
		}
	}
	return total, namespace
}

func (j *evaluation) risk(format string, args ...any) {
	j.Risks = append(j.Risks, fmt.Sprintf(format, args...))
}

// locks returns the Leases that were renewed, sorted.
func (p *Profile) locks() []string {
	out := []string{}
	if u := p.uses[schema.GroupResource{Group: "coordination.k8s.io", Resource: "leases"}]; u != nil {
		for o, n := range u.objects {
			if n >= again {
				out = append(out, o.namespace+"/"+o.name)
			}
		}
	}
	slices.Sort(out)
	return out
}

func named(resources []schema.GroupResource) string {
	names := collect.Map(resources, func(r schema.GroupResource) string { return r.String() })
	return clip.Join(names, maxNamed, ", ")
}
