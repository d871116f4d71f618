package lifecycle

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	kruise "github.com/ctrlmesh/ctrlmesh/api/kruise/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

const (
	memberName = "pulse"
	// enough requests in a row that succeeded through the mesh.
	enough = 20
)

// member is a labelled pod that sends requests all the time and runs an informer.
type member struct {
	*release
	pod *corev1.Pod
}

// request is a line of `probe pulse`.
type request struct {
	Start   time.Time `json:"start"`
	Kind    string    `json:"kind"`
	Code    int       `json:"code"`
	Error   string    `json:"error"`
	Issuers []string  `json:"issuers"`
}

// viaMesh reports whether the request succeeded, through the mesh if it needed a connection.
func (r request) viaMesh() bool {
	direct := slices.ContainsFunc(r.Issuers, func(issuer string) bool { return !strings.Contains(issuer, "O=ctrlmesh") })
	return r.Error == "" && r.Code < 400 && !direct
}

// createMember creates the pod and waits until the mesh serves it.
func (r *release) createMember(t *testing.T) *member {
	t.Helper()
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "chart-e2e-"}}
	require.NoError(t, r.Create(t.Context(), ns))
	t.Cleanup(func() { _ = r.Delete(context.WithoutCancel(t.Context()), ns) })
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: ns.Name, Name: memberName, Labels: map[string]string{meshv1alpha1.EnableProxyLabel: "true", "app": memberName}},
		Spec: corev1.PodSpec{
			ServiceAccountName: memberName,
			Containers:         []corev1.Container{{Name: "probe", Image: "localhost/ctrlmesh/probe:dev", ImagePullPolicy: corev1.PullIfNotPresent, Args: []string{"pulse"}}},
		},
	}
	require.NoError(t, r.CreateAll(t.Context(),
		&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: ns.Name, Name: memberName}},
		&rbacv1.ClusterRoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: ns.Name, OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Namespace", Name: ns.Name, UID: ns.UID}}},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin"},
			Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: ns.Name, Name: memberName}},
		},
		pod))
	m := &member{r, pod}
	m.waitServed(t, time.Now())
	return m
}

// requests returns those that began at a time or later, by time.
func (m *member) requests(ctx context.Context, since time.Time) ([]request, error) {
	log, err := m.Clientset.CoreV1().Pods(m.pod.Namespace).GetLogs(memberName, &corev1.PodLogOptions{}).DoRaw(ctx)
	if err != nil {
		return nil, fmt.Errorf("reading the member's log: %w", err)
	}
	var out []request
	for line := range strings.Lines(string(log)) {
		var r request
		if json.Unmarshal([]byte(line), &r) == nil && r.Kind != "" && !r.Start.Before(since) {
			out = append(out, r)
		}
	}
	slices.SortFunc(out, func(a, b request) int { return a.Start.Compare(b.Start) })
	return out, nil
}

// waitServed waits until enough requests in a row, which began after a time, succeeded.
func (m *member) waitServed(t *testing.T, since time.Time) {
	t.Helper()
	require.NoError(t, kube.UntilWithin(t.Context(), patience, "the member's requests", func(ctx context.Context) error {
		all, err := m.requests(ctx, since)
		if err != nil {
			return err
		}
		good := 0
		for _, r := range slices.Backward(all) {
			if !r.viaMesh() {
				return fmt.Errorf("%d succeeded after %+v", good, r)
			}
			if good++; good == enough {
				return nil
			}
		}
		return fmt.Errorf("only %d were sent", good)
	}))
}

// requireUndisturbed requires that no request failed, and that the informer did not list again.
func (m *member) requireUndisturbed(t *testing.T, during string, mark kube.Mark) {
	t.Helper()
	all, err := m.requests(t.Context(), mark.At)
	require.NoError(t, err)
	require.GreaterOrEqual(t, len(all), enough)
	for _, r := range all {
		assert.True(t, r.viaMesh(), "%s: %+v", during, r)
	}
	seen, err := m.PodRequests(mark, m.pod.Namespace+"/"+memberName)
	require.NoError(t, err)
	require.NotEmpty(t, seen)
	for _, r := range seen {
		lists := r.Verb == "list" || strings.Contains(r.URI, "sendInitialEvents=true")
		assert.False(t, r.Agent == "probe-informer" && lists, "%s: the informer listed again: %s", during, r)
	}
}

// agents returns the UIDs of the agents.
func (m *member) agents(t *testing.T) (uids []string) {
	t.Helper()
	var pods corev1.PodList
	require.NoError(t, m.List(t.Context(), &pods, client.InNamespace(kube.SystemNamespace), client.MatchingLabels{"app.kubernetes.io/name": kube.AgentName}))
	for _, pod := range pods.Items {
		uids = append(uids, string(pod.UID))
	}
	slices.Sort(uids)
	return uids
}

// appLabel is by what a VirtualApp selects pods.
const appLabel = "chart-e2e-app"

// createVirtualApp creates a VirtualApp, and waits until the mesh admits the pods that it
// selects. The chart installs the webhooks for them, and the manager their entries.
func (m *member) createVirtualApp(t *testing.T) *kruise.VirtualApp {
	t.Helper()
	app := &kruise.VirtualApp{
		ObjectMeta: metav1.ObjectMeta{Namespace: m.pod.Namespace, Name: "app"},
		Spec:       kruise.VirtualAppSpec{Selector: &metav1.LabelSelector{MatchLabels: map[string]string{appLabel: "app"}}},
	}
	require.NoError(t, m.Create(t.Context(), app))
	require.NoError(t, kube.UntilWithin(t.Context(), patience, "the pods of the VirtualApp", m.selected))
	return app
}

// selected returns an error unless the mesh admits a pod that the VirtualApp selects. It
// creates none.
func (m *member) selected(ctx context.Context) error {
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: m.pod.Namespace, Name: "selected", Labels: map[string]string{appLabel: "app"}},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "a", Image: "a"}}},
	}
	if err := m.Create(ctx, pod, client.DryRunAll); err != nil {
		return fmt.Errorf("creating a pod that the VirtualApp selects: %w", err)
	}
	if pod.Labels[meshv1alpha1.EnableProxyLabel] != "true" {
		return fmt.Errorf("the mesh did not label the pod, which has %v", pod.Labels)
	}
	return nil
}

// createBreaker creates a CircuitBreaker that allows all that the member sends.
func (m *member) createBreaker(t *testing.T) *meshv1alpha1.CircuitBreaker {
	t.Helper()
	manifest := fmt.Sprintf(`
apiVersion: ctrlmesh.kusionstack.io/v1alpha1
kind: CircuitBreaker
metadata: {name: cap, namespace: %s}
spec:
  selector: {matchLabels: {app: %s}}
  rateLimitings:
  - name: everything
    resourceRules:
    - {apiGroups: ["*"], resources: ["*"], verbs: ["*"], namespaces: ["*"]}
    bucket: {burst: 10000, interval: 1s, limit: 10000}
    triggerPolicy: LimiterOnly
`, m.pod.Namespace, memberName)
	require.NoError(t, m.Apply(t.Context(), []byte(manifest)))
	return &meshv1alpha1.CircuitBreaker{ObjectMeta: metav1.ObjectMeta{Namespace: m.pod.Namespace, Name: "cap"}}
}
