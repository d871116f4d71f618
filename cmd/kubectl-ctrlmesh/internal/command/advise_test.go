package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/meshtest"
	"github.com/ctrlmesh/ctrlmesh/manager/usage"
)

// advised runs the command advise in a cluster whose agents have a log.
func advised(t *testing.T, c *meshtest.Cluster, log string, args ...string) result {
	t.Helper()
	return runWithLogs(t, c, func(ctx context.Context, _, pod string, o *corev1.PodLogOptions) (io.ReadCloser, error) {
		switch {
		case log == "":
			return nil, errors.New("forbidden")
		case o.Follow: // until the context ends
			return &following{strings.NewReader(log), ctx}, nil
		}
		require.Equal(t, "ctrlmesh-agent-1", pod)
		return io.NopCloser(strings.NewReader(log)), nil
	}, append([]string{"advise"}, args...)...)
}

// following is a log that ends with a context.
type following struct {
	*strings.Reader
	ctx context.Context
}

func (f *following) Read(p []byte) (int, error) {
	if f.Len() > 0 {
		return f.Reader.Read(p)
	}
	<-f.ctx.Done()
	return 0, f.ctx.Err()
}

func (f *following) Close() error { return nil }

// works is the log of an agent, of a pod that writes foos in a number of namespaces.
func works(pod string, namespaces int) string {
	var b strings.Builder
	for i := range 30 {
		fmt.Fprintf(&b, `{"time":"2026-01-02T03:04:%02dZ","msg":"request","pod":"team/%s","verb":"update","group":"example.com","resource":"foos","namespace":"ns-%d","name":"x","code":200}`+"\n", i, pod, i%namespaces)
	}
	return b.String()
}

// onTheMesh returns a cluster with an operator on the mesh that has no configuration.
func onTheMesh(t *testing.T) *meshtest.Cluster {
	c := outsideTheMesh(t)
	labels := meshtest.Find[*appsv1.StatefulSet](t, c, team, "tally").Spec.Template.Labels // those of its pods, too
	labels[v1alpha1.EnableProxyLabel] = "true"
	return c
}

func TestAdvise(t *testing.T) {
	for name, c := range map[string]struct {
		log  string
		args []string
		code int
		want []string
	}{
		"divisible":   {works("tally-0", 3), nil, Healthy, []string{"VERDICT  can be divided by namespace\n", "DIVIDE   example.com/foos\n", "NEXT     kubectl ctrlmesh adopt statefulset/tally -n team --shards 2 --resources example.com/foos --dry-run\n"}},
		"pointless":   {works("tally-0", 1), nil, Found, []string{"VERDICT  is not worth dividing: all its writes are in namespace ns-0\n"}},
		"JSON":        {works("tally-0", 3), []string{"-o", "json"}, Healthy, []string{`"verdict": "can be divided by namespace"`}},
		"other pods":  {works("other-0", 3), nil, Unknown, []string{"is not known well enough", "too little was seen of the operator"}},
		"watched":     {works("tally-1", 3), []string{"--for=50ms"}, Healthy, []string{"watching for 50ms\n"}},
		"no log":      {"", nil, Unknown, []string{"you need permission to get pods/log in namespace ctrlmesh-system"}},
		"no workload": {"", []string{"-n", "elsewhere"}, Unknown, []string{"there is no statefulset/tally in namespace elsewhere"}},
	} {
		t.Run(name, func(t *testing.T) {
			cluster := onTheMesh(t)
			logging(t, cluster)
			r := advised(t, cluster, c.log, append([]string{"sts/tally", "-n", team}, c.args...)...)
			require.Equal(t, c.code, r.code, "%s", r)
			for _, want := range c.want {
				require.Contains(t, r.String(), want)
			}
		})
	}
}

// The manager records what operators request, so that agents need not log it.
func TestAdviseReadsTheRecord(t *testing.T) {
	c := onTheMesh(t)
	use := &meshv1.ResourceUsage{Group: "example.com", Resource: "foos", All: true, Writes: 40, Namespaces: []*meshv1.NamespaceWrites{{Namespace: "a", Writes: 15}, {Namespace: "b", Writes: 15}}, OtherWrites: 10}
	locks := &meshv1.ResourceUsage{Group: "coordination.k8s.io", Resource: "leases", Writes: 9, Namespaces: []*meshv1.NamespaceWrites{{Namespace: team, Writes: 9}}, Objects: []*meshv1.ObjectWrites{{Namespace: team, Name: "leader", Writes: 9}}}
	record := usage.Record{}
	record.Update("statefulset.tally", &meshv1.PodUsage{Uid: "1", Name: "tally-0", Usage: &meshv1.Usage{SinceMs: 1000, LastMs: 61_000, Requests: 100, Resources: []*meshv1.ResourceUsage{locks, use}}})
	data, err := record.Encode()
	require.NoError(t, err)
	c.Add(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: team, Name: usage.ConfigMap}, Data: data})
	r := advised(t, c, "", "sts/tally", "-n", team)
	require.Equal(t, Healthy, r.code, "%s", r)
	require.Equal(t, `VERDICT  can be divided by namespace
SEEN     100 requests of 1 pod in 1m0s
DIVIDE   example.com/foos
LOCK     team/leader
NEXT     kubectl ctrlmesh adopt statefulset/tally -n team --shards 2 --resources example.com/foos --dry-run
`, r.out)
	require.Contains(t, advised(t, c, "", "sts/tally", "-n", team, "--since=1h").err, "logs no access lines", "the user wants the logs")
}

func TestAdviceForAnAdoptedOperatorLeadsToItsShards(t *testing.T) {
	c := onTheMesh(t)
	logging(t, c)
	c.Add(&v1alpha1.ShardingConfig{ObjectMeta: metav1.ObjectMeta{Namespace: team, Name: "by-name"}, Spec: v1alpha1.ShardingConfigSpec{Root: &v1alpha1.RootConfig{TargetStatefulSet: "tally"}}})
	r := advised(t, c, works("tally-0", 3), "sts/tally", "-n", team)
	require.Equal(t, Healthy, r.code, "%s", r)
	require.Contains(t, r.out, "NEXT     kubectl ctrlmesh shards by-name -n team\n")
}

func TestAdviseRefuses(t *testing.T) {
	require.Contains(t, advised(t, onTheMesh(t), "a", "sts/tally", "-n", team).err, "turn them on by kubectl apply -k deploy/debug")
	require.Contains(t, advised(t, onTheMesh(t), "a", "tally").err, "name it as statefulset/NAME")
	outside := outsideTheMesh(t)
	logging(t, outside)
	require.Contains(t, advised(t, outside, "a", "sts/tally", "-n", team).err, "kubectl -n team patch statefulset/tally --type=merge")
}
