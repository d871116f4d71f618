package e2e

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/tests/audit"
	"github.com/ctrlmesh/ctrlmesh/tests/operators/sloppy/check"
)

// The operator sloppy has bugs. Each shows only under the fault that exposes it, and the
// operator without the bug works under the same fault.
func TestBuggyOperator(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ bug, rule string }{
		{"stale-read", `
  match: {resources: [{resources: [configmaps], verbs: [list]}]}
  staleList: {age: 1h, percent: "100"}`},
		{"lost-event", `
  match: {resources: [{resources: [configmaps], verbs: [watch]}]}
  watch: {drop: {percent: "50"}}
  seed: 1`},
		{"assumed-create", `
  match: {resources: [{resources: [configmaps], verbs: [create]}]}
  abort: {httpStatus: 500, percent: "100"}
  count: 9`},
	} {
		for _, run := range []struct{ name, bug, rule string }{
			{c.bug + " without the fault", c.bug, ""},
			{c.bug + " without the bug", "", c.rule},
			{c.bug, c.bug, c.rule},
		} {
			t.Run(run.name, func(t *testing.T) {
				t.Parallel()
				testSloppy(t, run.bug, run.rule)
			})
		}
	}
}

// testSloppy runs the operator in a namespace of its own, with a bug, under a fault, both or
// neither. All is correct in the end, unless the fault exposed the bug.
func testSloppy(t *testing.T, bug, rule string) {
	s := sloppyTest{ns: namespace(t, "sloppy")}
	probeRights(t, s.ns)
	var leaving []*corev1.ConfigMap
	for i := range 8 { // the deletion is dropped of some, and delivered of others
		leaving = append(leaving, s.claim(t, fmt.Sprint("goes-", i)))
	}
	stays := s.claim(t, "stays")
	var f *meshv1alpha1.FaultInjection
	if rule != "" { // before the operator starts: a watch keeps the rules that it began with
		f = faults(t, s.ns, "fault", "httpFault:\n- name: fault"+rule+"\n", 0)
	}
	s.start(t, bug)
	s.served(t, stays)
	for i, cm := range leaving {
		remove(t, cm)
		patch(t, stays, fmt.Sprintf(`{"data": {"n": "%d"}}`, i))
	}
	if f != nil {
		counted(t, s.pod.Spec.NodeName, "ctrlmesh_faults_injected_total", map[string]string{"namespace": s.ns}, 1)
		s.round(t)
		remove(t, f)
	}
	if bug != "" && f != nil {
		s.round(t)
		found, err := s.wrong(t.Context())
		require.NoError(t, err)
		require.NotEmpty(t, found)
		t.Log(found)
		return
	}
	s.served(t, stays)
	until(t, "all to be right", func(ctx context.Context) error {
		found, err := s.wrong(ctx)
		if err == nil && len(found) > 0 {
			err = fmt.Errorf("%s", found)
		}
		return err
	})
}

// sloppyTest is one run of the operator.
type sloppyTest struct {
	ns  string
	pod *corev1.Pod // set by start
}

// claim creates an object for the operator to serve.
func (s *sloppyTest) claim(t *testing.T, name string) *corev1.ConfigMap {
	t.Helper()
	cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: s.ns, Name: name, Labels: map[string]string{check.ClaimLabel: ""}}}
	create(t, cm)
	return cm
}

// start starts the operator with a bug, or without if it is empty.
func (s *sloppyTest) start(t *testing.T, bug string) {
	t.Helper()
	pod := netPod(s.ns, "sloppy", "")
	c := &pod.Spec.Containers[0]
	c.Image, c.Command = "localhost/ctrlmesh/sloppy:dev", []string{"/sloppy", "-namespace=" + s.ns, "-bug=" + bug}
	create(t, pod)
	s.pod = ready(t, s.ns, pod.Name)
}

// served waits until the operator has served a claim.
func (s *sloppyTest) served(t *testing.T, cm *corev1.ConfigMap) {
	t.Helper()
	until(t, "claim "+cm.Name+" to be served", func(ctx context.Context) error {
		err := cluster.Get(ctx, client.ObjectKeyFromObject(cm), cm)
		if err == nil {
			err = orElse(cm.Annotations[check.DoneAnnotation] != "", "it is not")
		}
		return err
	})
}

// wrong returns what is wrong with the objects.
func (s *sloppyTest) wrong(ctx context.Context) ([]string, error) {
	var all corev1.ConfigMapList
	err := cluster.List(ctx, &all, client.InNamespace(s.ns))
	return check.Wrong(all.Items), err
}

// round waits until the operator starts its next watch.
func (s *sloppyTest) round(t *testing.T) {
	t.Helper()
	log := cluster.RequestLog(mark(t), audit.Callers{Pods: []string{s.ns + "/" + s.pod.Name}})
	until(t, "a round", func(context.Context) error {
		requests, err := log.Requests()
		return errors.Join(err, orElse(slices.ContainsFunc(requests, func(r audit.Request) bool { return r.Verb == "watch" }), "it is not over"))
	})
}
