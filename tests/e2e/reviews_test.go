package e2e

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
	v2 "github.com/ctrlmesh/ctrlmesh/tests/operators/reviewer/v2"
	"github.com/ctrlmesh/ctrlmesh/tests/reviews"
)

// TestReviews runs an operator with webhooks in two versions under one configuration. Whichever
// pod the apiserver calls, the version that owns the namespace answers.
func TestReviews(t *testing.T) {
	r := newReviewed(t)
	run := func(name string, test func(*testing.T)) {
		if !t.Run(name, test) {
			root, err := r.Root(t.Context())
			t.Logf("the configuration: %+v %v", root.Status, err)
		}
	}
	run("AgentsRolled", r.testAgentsRolled)
	run("AgentKilled", r.testAgentKilled)
	t.Parallel() // no test replaces agents from here on
	r.routed(t)  // others have
	require.NoError(t, r.AwaitHealthy(t.Context()))
	run("EachPodRoutes", r.testEachPodRoutes)
	run("Creates", r.testCreates)
	run("Refused", r.testRefused)
	run("Conversion", r.testConversion)
	run("NotListening", r.testNotListening)
	run("CapturedByAddress", r.testCapturedByAddress)
	run("Certificate", r.testCertificate)
}

// reviewed is an operator with webhooks, and the namespaces that its versions divide.
type reviewed struct {
	*reviews.Site
	namespaces tenants
	owners     map[string]string // versions by namespace
}

// newReviewed installs the operator, and waits until the reviews of all namespaces are routed.
func newReviewed(t *testing.T) *reviewed {
	t.Helper()
	r := &reviewed{namespaces: newTenants(t, 6), owners: map[string]string{}}
	home := namespace(t, "e2e-reviews")
	probeRights(t, home)
	site, err := reviews.Install(t.Context(), cluster, home, probeAccount)
	if site != nil {
		t.Cleanup(func() {
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			defer cancel()
			assert.NoError(t, site.Remove(ctx))
		})
	}
	require.NoError(t, err)
	r.Site = site
	for i, ns := range r.namespaces {
		r.owners[ns] = []string{reviews.Next, reviews.Stable}[i%2]
		require.NoError(t, site.Own(t.Context(), ns, r.owners[ns]))
	}
	r.routed(t)
	require.NoError(t, site.AwaitSettled(t.Context()))
	require.NoError(t, site.AwaitHealthy(t.Context()))
	return r
}

func (r *reviewed) routed(t *testing.T) {
	t.Helper()
	require.NoError(t, r.AwaitRouted(t.Context(), r.owners))
}

// judge returns a judge by the owners, which do not change.
func (r *reviewed) judge() *reviews.Checker {
	j := &reviews.Checker{}
	for ns, version := range r.owners {
		j.Tenures = append(j.Tenures, reviews.Tenure{Namespace: ns, Version: version})
	}
	return j
}

// require requires that all creates succeeded, and that the owners answered.
func (r *reviewed) require(t *testing.T, j *reviews.Checker, outcomes []reviews.Outcome) reviews.Verdict {
	t.Helper()
	v := j.Check(outcomes)
	t.Logf("%+v", v)
	require.Empty(t, v.Findings)
	require.Zero(t, v.Misrouted+v.Failed)
	require.NotZero(t, v.Checked)
	return v
}

// load creates objects until it is stopped, or the test ends.
func (r *reviewed) load(t *testing.T) *reviews.Load {
	t.Helper()
	l := r.Load(t.Context(), 50, r.namespaces...)
	t.Cleanup(func() { l.Stop() })
	require.NoError(t, l.Await(t.Context(), time.Now(), 20))
	return l
}

// decisions returns how many reviews the agents decided in each way.
func (r *reviewed) decisions(t *testing.T) map[string]float64 {
	t.Helper()
	out := map[string]float64{}
	for _, node := range nodes(t) {
		families := scrapeAgent(t, node)
		for _, decision := range []string{"local", "forwarded", "unreachable", "allowed"} {
			out[decision] += kube.Total(families["ctrlmesh_reviews_total"], map[string]string{"namespace": r.Home, "decision": decision})
		}
	}
	return out
}

// Each pod answers reviews of its own namespaces, and forwards the others. The agents count
// them.
func (r *reviewed) testEachPodRoutes(t *testing.T) {
	before := r.decisions(t)
	pods := 0
	require.NoError(t, r.EachPod(t.Context(), func(pod *corev1.Pod, version string) error {
		pods++
		return r.Routes(t.Context(), pod, version, r.owners)
	}))
	require.Equal(t, 2*reviews.Replicas, pods)
	each := float64(len(r.namespaces)) / 2 // of each version
	forwarded := before["forwarded"] + float64(pods)*each
	// Own ones, and those that were forwarded, which their second agent counts again.
	local := before["local"] + 2*float64(pods)*each
	var after map[string]float64
	until(t, "the reviews to be counted", func(context.Context) error { // a moment after the answer
		after = r.decisions(t)
		return orElse(after["forwarded"] >= forwarded && after["local"] >= local, fmt.Sprint(after))
	})
	assert.InDelta(t, forwarded, after["forwarded"], 0)
	assert.InDelta(t, local, after["local"], 0)
	assert.InDelta(t, before["unreachable"], after["unreachable"], 0)
	assert.InDelta(t, before["allowed"], after["allowed"], 0)
}

// Objects are created in all namespaces, by way of the apiserver.
func (r *reviewed) testCreates(t *testing.T) {
	const creates = 200
	before := r.decisions(t)
	var outcomes []reviews.Outcome
	for i := range creates {
		outcomes = append(outcomes, r.Create(t.Context(), r.namespaces[i%len(r.namespaces)], nil))
	}
	v := r.require(t, r.judge(), outcomes)
	require.Equal(t, creates, v.Checked)
	after := r.decisions(t)
	assert.Greater(t, after["forwarded"], before["forwarded"], "the apiserver keeps a connection to a pod, which does not own all namespaces")
	assert.InDelta(t, before["unreachable"], after["unreachable"], 0)
	// A create that is not a dry run stores the webhook's changes.
	last := outcomes[creates-1]
	stored := &v2.Paper{}
	require.NoError(t, cluster.Get(t.Context(), client.ObjectKey{Namespace: last.Namespace, Name: last.Name}, stored))
	require.Equal(t, last.Mutated, v2.Marked(stored))
}

// The version that owns the namespace refuses an object, and says so.
func (r *reviewed) testRefused(t *testing.T) {
	for ns, version := range r.owners {
		o := r.Create(t.Context(), ns, map[string]string{v2.RefusedLabel: ""})
		require.True(t, apierrors.IsForbidden(o.Err), "%v", o.Err)
		require.ErrorContains(t, o.Err, "version "+version+" in pod "+version+"-")
	}
}

func (r *reviewed) testConversion(t *testing.T) {
	for _, ns := range r.namespaces {
		heading, title, err := r.Convert(t.Context(), ns, "of "+ns)
		require.NoError(t, err)
		require.Equal(t, "of "+ns, heading)
		require.Equal(t, "of "+ns, title)
	}
}

// A pod whose application does not listen yet refuses connections. Once the application
// listens, its reviews are routed.
func (r *reviewed) testNotListening(t *testing.T) {
	pod, err := r.Single(t.Context(), "late", reviews.Next, meshv1alpha1.CaptureEBPF)
	require.NoError(t, err)
	t.Cleanup(func() { r.deleted(t, pod) })
	require.NoError(t, r.AwaitUnrouted(t.Context(), pod.Name, "connecting to the webhook"))
	require.ErrorContains(t, r.Listens(t.Context(), pod), "refused")
	require.NoError(t, r.Open(t.Context(), pod))
	require.NoError(t, r.Listens(t.Context(), pod))
	require.NoError(t, r.AwaitHealthy(t.Context()))
	until(t, "its reviews to be routed", func(ctx context.Context) error { return r.Routes(ctx, pod, reviews.Next, r.owners) })
}

// The reviews of a pod that is captured by address are not routed, and the condition says why.
func (r *reviewed) testCapturedByAddress(t *testing.T) {
	pod, err := r.Single(t.Context(), "addressed", reviews.Next, meshv1alpha1.CaptureAddress)
	require.NoError(t, err)
	t.Cleanup(func() { r.deleted(t, pod) })
	require.NoError(t, r.Open(t.Context(), pod))
	require.NoError(t, r.AwaitUnrouted(t.Context(), pod.Name, "captured by address"))
	for ns := range r.owners {
		by, err := r.Ask(t.Context(), pod, ns)
		require.NoError(t, err)
		require.Equal(t, v2.Reviewer{Version: reviews.Next, Pod: pod.Name}, by, "the application answers by itself")
	}
}

// deleted deletes a pod, and waits until the configuration does not report it any more, and the nodes
// send no reviews to its address.
func (r *reviewed) deleted(t *testing.T, pod *corev1.Pod) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	assert.NoError(t, cluster.Delete(ctx, pod))
	assert.NoError(t, r.AwaitHealthy(ctx))
	assert.NoError(t, kube.Until(ctx, "reviews by other pods", func(ctx context.Context) error {
		for i := range 20 { // any of the pods may be called
			if o := r.Create(ctx, r.namespaces[i%len(r.namespaces)], nil); o.Err != nil {
				return o.Err
			}
		}
		return nil
	}))
}

// The certificate is replaced under load. No review fails, and all are routed.
func (r *reviewed) testCertificate(t *testing.T) {
	l := r.load(t)
	require.NoError(t, r.Rotate(t.Context()))
	require.NoError(t, l.Await(t.Context(), time.Now(), 100))
	r.require(t, r.judge(), l.Stop())
	r.routed(t)
	require.NoError(t, r.AwaitHealthy(t.Context()))
}

// The agents are replaced under load, twice. No review fails, and all are routed.
func (r *reviewed) testAgentsRolled(t *testing.T) {
	l := r.load(t)
	restore := changedAgents(t, func(s *corev1.PodTemplateSpec) {
		metav1.SetMetaDataAnnotation(&s.ObjectMeta, "example.com/reviews", fmt.Sprint(time.Now().UnixNano()))
	})
	require.NoError(t, l.Await(t.Context(), time.Now(), 100))
	restore()
	require.NoError(t, l.Await(t.Context(), time.Now(), 100))
	r.require(t, r.judge(), l.Stop())
	r.routed(t)
}

// An agent is killed under load. No review fails but those that it was answering, and all are
// routed once the agent is back.
func (r *reviewed) testAgentKilled(t *testing.T) {
	j := r.judge()
	l := r.load(t)
	for _, node := range nodes(t) {
		from := time.Now()
		killAgent(t, node)
		j.Dying = append(j.Dying, reviews.Window{From: from, To: time.Now()})
		agentStarted(t, node, from)
		r.routed(t)
		j.Away = append(j.Away, reviews.Window{From: from, To: time.Now()})
		require.NoError(t, l.Await(t.Context(), time.Now(), 100))
	}
	v := r.require(t, j, l.Stop())
	t.Logf("%d reviews were cut off with their agents", v.Cut)
}
