package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

// A member of a shard is compared with a pod outside of the mesh that selects the shard's
// objects itself. The subtests share one setup because it takes some seconds. The one that
// deletes runs late.
func TestMember(t *testing.T) {
	t.Parallel()
	m := newMembers(t)
	for _, test := range []struct {
		name string
		run  func(*testing.T)
	}{
		{"Stamping", m.testStamping},
		{"Status", m.testStatus},
		{"Selectors", m.testSelectors},
		{"Formats", m.testFormats},
		{"Reads", m.testReads},
		{"Chunks", m.testChunks},
		{"Unlisted", m.testUnlisted},
		{"Watch", m.testWatch},
		{"WatchEnd", m.testWatchEnd},
		{"WatchList", m.testWatchList},
		{"Informers", m.testInformers},
		{"WebSocket", m.testWebSocket},
		{"Kubectl", m.testKubectl},
		{"DeleteCollection", m.testDeleteCollection},
		{"Metrics", m.testMetrics},
		{"Traffic", m.testTraffic},
		{"Trust", m.testTrust},
		{"Tokens", m.testTokens},
		{"Distrust", m.testDistrust},
	} {
		t.Run(test.name, test.run)
	}
}

// members is a StatefulSet of two pods, each the only member of a shard, and a pod
// outside of the mesh with the same service account.
type members struct {
	home   string         // their namespace
	owned  [2][]string    // the namespaces of each shard
	pods   [2]*corev1.Pod // its member
	direct *corev1.Pod    // the pod outside
}

const (
	workload = "probe"
	perSpace = 40 // ConfigMaps in each namespace
	// payload makes a list of a shard's ConfigMaps larger than 128 KiB, from which the
	// apiserver compresses.
	payload = 2 << 10
)

func newMembers(t *testing.T) *members {
	t.Helper()
	m := &members{home: namespace(t, "e2e-member")}
	probeRights(t, m.home)
	for i := range m.owned {
		for range 2 {
			m.owned[i] = append(m.owned[i], namespace(t, fmt.Sprintf("e2e-member-%d", i)))
		}
		slices.Sort(m.owned[i])
	}
	m.fill(t, 0, perSpace/2)
	for i, owned := range m.owned {
		create(t, shard(m.home, m.shard(i), []string{fmt.Sprintf("%s-%d", workload, i)}, owned, "configmaps"))
	}
	for i := range m.owned { // a pod created before the manager knows them would not be a member
		until(t, "the manager to see "+m.shard(i), func(ctx context.Context) error {
			c := &meshv1alpha1.ShardingConfig{}
			err := cluster.Get(ctx, client.ObjectKey{Namespace: m.home, Name: m.shard(i)}, c)
			if err == nil && c.Status.ObservedGeneration == 0 {
				err = fmt.Errorf("it has no status")
			}
			return err
		})
	}
	direct := probe(m.home, "direct", false)
	direct.Labels[podNameLabel] = workload + "-0" // a shard's selector matches, but it lacks the label of the mesh
	labels := map[string]string{"app": workload, meshv1alpha1.EnableProxyLabel: "true"}
	create(t, direct, &appsv1.StatefulSet{
		ObjectMeta: metav1.ObjectMeta{Namespace: m.home, Name: workload},
		Spec: appsv1.StatefulSetSpec{
			Replicas: new(int32(len(m.pods))), PodManagementPolicy: appsv1.ParallelPodManagement,
			Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": workload}},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: probeSpec()},
		},
	})
	for i := range m.pods {
		settled(t, m.home, m.shard(i), 1)
		m.pods[i] = ready(t, m.home, fmt.Sprintf("%s-%d", workload, i))
	}
	m.direct = ready(t, m.home, "direct")
	m.fill(t, perSpace/2, perSpace)
	return m
}

func (m *members) shard(i int) string { return fmt.Sprintf("shard-%d", i) }

// foreign returns the namespaces of the other shard.
func (m *members) foreign(shard int) []string { return m.owned[1-shard] }

// selector returns the shard's selector, as a user outside of the mesh would write it.
func (m *members) selector(shard int) string {
	return fmt.Sprintf("%s in (%s)", meshv1alpha1.NamespaceLabel, strings.Join(m.owned[shard], ","))
}

// fill creates the ConfigMaps numbered first to end in each namespace.
func (m *members) fill(t *testing.T, first, end int) {
	t.Helper()
	g, ctx := errgroup.WithContext(t.Context())
	g.SetLimit(8)
	for _, owned := range m.owned {
		for _, ns := range owned {
			for i := first; i < end; i++ {
				g.Go(func() error { return cluster.Create(ctx, configMap(ns, i)) })
			}
		}
	}
	require.NoError(t, g.Wait())
}

// configMap has labels for all operators of selectors: one of three colours, a
// number, and on every second one a label to exist or not.
func configMap(ns string, i int) *corev1.ConfigMap {
	cm := &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: fmt.Sprintf("cm-%02d", i), Labels: map[string]string{
			"color": []string{"red", "green", "blue"}[i%3], "n": strconv.Itoa(i),
		}},
		Data: map[string]string{"payload": strings.Repeat(fmt.Sprintf("%s %d. ", ns, i), payload/len(ns))[:payload]},
	}
	if i%2 == 1 {
		cm.Labels["odd"] = ""
	}
	return cm
}

// revision returns the newest resourceVersion of ConfigMaps. Lists at exactly this version
// are the same, byte for byte, for every client and every time.
func revision(t *testing.T) string {
	t.Helper()
	list, err := cluster.Clientset.CoreV1().ConfigMaps("").List(t.Context(), metav1.ListOptions{Limit: 1})
	require.NoError(t, err)
	return list.ResourceVersion
}

func at(revision string) string {
	return "resourceVersion=" + revision + "&resourceVersionMatch=Exact"
}

// answer is an answer as probe prints it.
type answer struct {
	Code   int
	Proto  string
	Header http.Header
	Body   []byte
	Frames [][]byte
}

// ask sends requests from inside of a pod. A container runtime without time may lose the output of a
// command that succeeded: reads are repeated then.
func ask(t *testing.T, pod *corev1.Pod, flags []string, method string, paths ...string) []answer {
	t.Helper()
	command := append(append(append([]string{"probe", "raw"}, flags...), method), paths...)
	printed := in(t, pod, command...)
	for range 3 {
		if printed != "" || method != http.MethodGet {
			break
		}
		t.Log("the output of probe was lost")
		printed = in(t, pod, command...)
	}
	var out []answer
	require.NoError(t, json.Unmarshal([]byte(printed), &out))
	require.Len(t, out, len(paths))
	return out
}

func accept(value string) []string { return []string{"-H", "Accept: " + value} }

// both sends a request as a shard's member, and outside the mesh with the shard's selector
// added to the request's own, unless any shard may read the object.
func (m *members) both(t *testing.T, shard int, flags []string, method string, paths ...string) (member, direct []answer) {
	t.Helper()
	narrowed := make([]string, len(paths))
	for i, path := range paths {
		narrowed[i] = path
		if !oneObject(t, path) {
			narrowed[i] = joined(t, path, m.selector(shard))
		}
	}
	return ask(t, m.pods[shard], flags, method, paths...), ask(t, m.direct, flags, method, narrowed...)
}

// oneObject reports whether a list is of one object of one namespace, which any shard may read.
func oneObject(t *testing.T, path string) bool {
	t.Helper()
	u, err := url.Parse(path)
	require.NoError(t, err)
	selector, err := fields.ParseSelector(u.Query().Get("fieldSelector"))
	require.NoError(t, err)
	_, one := selector.RequiresExactMatch("metadata.name")
	return one && strings.Contains(u.Path, "/namespaces/")
}

func joined(t *testing.T, path, selector string) string {
	t.Helper()
	u, err := url.Parse(path)
	require.NoError(t, err)
	q := u.Query()
	if own := q.Get("labelSelector"); own != "" {
		selector = own + "," + selector
	}
	q.Set("labelSelector", selector)
	u.RawQuery = q.Encode()
	return u.String()
}
