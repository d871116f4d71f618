package advise

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/render"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/tap"
	"github.com/ctrlmesh/ctrlmesh/manager/resources"
)

// seen is what an operator does: a line is "verb resource.group namespace/name code times".
func seen(t testing.TB, lines ...string) *Profile {
	t.Helper()
	p := &Profile{}
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	for _, l := range lines {
		f := strings.Fields(l)
		require.Len(t, f, 5, l)
		resource, group, _ := strings.Cut(f[1], ".")
		namespace, name, _ := strings.Cut(f[2], "/")
		var code, times int
		_, err := fmt.Sscan(f[3]+" "+f[4], &code, &times)
		require.NoError(t, err)
		for range times {
			at = at.Add(time.Second)
			line := tap.Line{Time: at, Message: "request", Pod: "team/op-0", Verb: f[0], Group: group, Resource: resource, Namespace: namespace, Name: strings.Trim(name, "-"), Code: code}
			if line.Namespace == "-" {
				line.Namespace = ""
			}
			if f[0] == "watch" {
				p.Add(line) // its end does not count
				line.Message = "stream begins"
			}
			p.Add(line)
		}
	}
	return p
}

var served = resources.ServedBy([]*metav1.APIResourceList{
	{GroupVersion: "v1", APIResources: []metav1.APIResource{
		{Name: "configmaps", Namespaced: true}, {Name: "secrets", Namespaced: true}, {Name: "events", Namespaced: true}, {Name: "nodes"},
	}},
	{GroupVersion: "example.com/v1", APIResources: []metav1.APIResource{{Name: "foos", Namespaced: true}}},
	{GroupVersion: "coordination.k8s.io/v1", APIResources: []metav1.APIResource{{Name: "leases", Namespaced: true}}},
	{GroupVersion: "rbac.authorization.k8s.io/v1", APIResources: []metav1.APIResource{{Name: "clusterroles"}}},
	{GroupVersion: "authorization.k8s.io/v1", APIResources: []metav1.APIResource{{Name: "subjectaccessreviews"}}},
}, nil)

// usual is an operator that reconciles foos, writes a Secret for each, and elects a leader.
var usual = []string{
	"watch foos.example.com -/ 200 1", "list foos.example.com -/ 200 1", "get secrets b/x 200 2", "create secrets a/ 201 4", "update secrets b/x 200 4", "patch secrets c/y 200 4",
	"update leases.coordination.k8s.io team/op-lock 200 5", "create events a/ 201 30", "create subjectaccessreviews.authorization.k8s.io -/ 201 9",
}

func TestVerdicts(t *testing.T) {
	for name, c := range map[string]struct {
		lines                    []string
		verdict, because, divide string
		risks                    []string
	}{
		"usual": {lines: usual, verdict: Divisible, divide: "example.com/foos secrets"},
		"nothing yet": {
			lines: usual[:2], verdict: Unseen, because: "it needs at least 20 requests",
		},
		"idle": {
			lines: []string{"watch foos.example.com -/ 200 20"}, verdict: Unseen, because: "it wrote nothing in other namespaces than its own",
		},
		"one namespace": {
			lines: []string{"watch foos.example.com -/ 200 1", "update foos.example.com a/x 200 20"}, verdict: Pointless, because: "all its writes are in namespace a",
		},
		"its own namespace": {
			lines: []string{"watch configmaps team/ 200 1", "update configmaps team/x 200 20"}, verdict: Pointless, because: "writes in namespace team alone",
		},
		"no namespace": {
			lines:   []string{"watch nodes -/ 200 1", "patch nodes -/n 200 20", "update leases.coordination.k8s.io team/op-lock 200 5"},
			verdict: ByObject, because: "it writes nodes, which are in no namespace",
			risks: []string{"writes nodes, which are in no namespace (20 writes)"},
		},
		"everything at once": {
			lines: append([]string{
				"update clusterroles.rbac.authorization.k8s.io -/r 200 3", "update configmaps team/state 200 3", "patch secrets a/z 409 2", "patch secrets a/z 200 90", "get secrets d/z 403 2",
			}, usual[:6]...),
			verdict: Divisible, divide: "example.com/foos secrets",
			risks: []string{
				"writes clusterroles.rbac.authorization.k8s.io, which are in no namespace (3 writes)", "2 writes of secrets conflicted",
				"rewrites configmaps state in its own namespace", "92 % of the writes are in namespace a", "it renewed no Lease", "refused 2 requests (403)",
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			got := Evaluate(Input{Profile: seen(t, c.lines...), Namespace: "team", Workload: "sts/op", Served: served})
			require.Equal(t, c.verdict, got.Verdict, "%+v", got)
			require.Contains(t, got.Because, c.because)
			require.Equal(t, c.divide, strings.Join(got.Divide, " "))
			require.Equal(t, c.verdict != Divisible, got.Findings())
			require.Len(t, got.Risks, len(c.risks), "%s", got.Risks)
			for i, want := range c.risks {
				require.Contains(t, got.Risks[i], want)
			}
		})
	}
}

// What the manager recorded says more than access lines do.
func TestRecordedRisks(t *testing.T) {
	foos := &meshv1.ResourceUsage{Group: "example.com", Resource: "foos", All: true, Events: 70, Indivisible: true}
	secrets := &meshv1.ResourceUsage{
		Resource: "secrets", Writes: 34, Bytes: 2048,
		Namespaces: []*meshv1.NamespaceWrites{{Namespace: "a", Writes: 20}, {Namespace: "infra", Writes: 12}, {Namespace: "rare", Writes: 2}},
		Cross: []*meshv1.CrossWrites{
			{Namespace: "a", CauseGroup: "example.com", CauseResource: "foos", Writes: 3}, // by chance
			{Namespace: "infra", CauseGroup: "example.com", CauseResource: "foos", Writes: 9},
			{Namespace: "infra", CauseResource: "configmaps", Writes: 2},
			{Namespace: "rare", CauseGroup: "example.com", CauseResource: "foos", Writes: 2},
		},
	}
	p := &Profile{}
	p.Record(&meshv1.WorkloadUsage{Pods: []*meshv1.PodUsage{{Name: "op-0", Usage: &meshv1.Usage{Requests: 40, LastMs: 1000, Resources: []*meshv1.ResourceUsage{foos, secrets}}}}})
	got := Evaluate(Input{Profile: p, Namespace: "team", Workload: "sts/op", Served: served})
	require.Equal(t, Divisible, got.Verdict)
	require.Equal(t, "40 requests of 1 pod in 1s, 70 events of watches, 2 KiB of other responses", got.Seen)
	require.Len(t, got.Risks, 4, "%s", got.Risks)
	require.Contains(t, got.Risks[0], "foos.example.com in encodings that the mesh cannot divide")
	require.Contains(t, got.Risks[1], "writes secrets in infra after changes of configmaps, foos.example.com in other namespaces (11 of 12 writes)")
}

func TestAdviceIsPrinted(t *testing.T) {
	var out bytes.Buffer
	advice := Evaluate(Input{Profile: seen(t, usual...), Namespace: "team", Workload: "sts/op", Served: served})
	require.NoError(t, render.Write(&out, "table", advice))
	require.Equal(t, `VERDICT  can be divided by namespace
SEEN     60 requests of 1 pod in 59s
DIVIDE   example.com/foos, secrets
LOCK     team/op-lock
NEXT     kubectl ctrlmesh adopt sts/op -n team --shards 2 --resources example.com/foos,secrets --dry-run
`, out.String())
	text, err := json.Marshal(Evaluate(Input{Profile: &Profile{}}))
	require.NoError(t, err)
	require.NotContains(t, string(text), "null", "lists are never absent")
}

// Pods choose names: what is kept of them is bounded.
func TestProfileIsBounded(t *testing.T) {
	p := &Profile{}
	for i := range maxKeys + 10 {
		p.Add(tap.Line{Message: "request", Pod: "a/b", Verb: "update", Resource: "secrets", Namespace: fmt.Sprint(i), Name: fmt.Sprint(i), Code: 200})
	}
	for i := range maxResources + 10 {
		p.Add(tap.Line{Message: "request", Pod: "a/b", Verb: "update", Resource: fmt.Sprint(i), Code: 200})
	}
	require.Len(t, p.uses, maxResources)
	u := p.uses[schema.GroupResource{Resource: "secrets"}]
	require.Equal(t, maxKeys+10, u.writes)
	require.Len(t, u.namespaces, maxKeys)
	require.Len(t, u.objects, maxKeys)
}
