package e2e

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/tests/audit"
	"github.com/ctrlmesh/ctrlmesh/tests/operators/sloppy/check"
)

// The operator sloppy has bugs. Each is silent until one rule exposes it, and the operator
// without it takes the same rule.
func testBuggyOperator(t *testing.T) {
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

// testSloppy lets the operator work in a namespace of its own, under a fault if there is one.
// When that is over all is right in the end, but for a bug that it exposed.
func testSloppy(t *testing.T, bug, rule string) {
	ns := namespace(t, "sloppy")
	probeRights(t, ns)
	claim := func(name string) *corev1.ConfigMap {
		t.Helper()
		cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name, Labels: map[string]string{check.ClaimLabel: ""}}}
		create(t, cm)
		return cm
	}
	served := func(cm *corev1.ConfigMap) {
		t.Helper()
		until(t, "claim "+cm.Name+" to be served", func(ctx context.Context) error {
			err := cluster.Get(ctx, client.ObjectKeyFromObject(cm), cm)
			if err == nil {
				err = orElse(cm.Annotations[check.DoneAnnotation] != "", "it is not")
			}
			return err
		})
	}
	wrong := func(ctx context.Context) ([]string, error) {
		var all corev1.ConfigMapList
		err := cluster.List(ctx, &all, client.InNamespace(ns))
		return check.Wrong(all.Items), err
	}
	var leaving []*corev1.ConfigMap
	for i := range 8 { // of some the deletion is dropped, and of others it is told
		leaving = append(leaving, claim(fmt.Sprint("goes-", i)))
	}
	stays := claim("stays")
	var f *meshv1alpha1.FaultInjection
	if rule != "" { // before the operator is: a watch meets the rules of when it began
		f = faults(t, ns, "fault", "httpFault:\n- name: fault"+rule+"\n", 0)
	}
	pod := netPod(ns, "sloppy", "")
	c := &pod.Spec.Containers[0]
	c.Image, c.Command = "localhost/ctrlmesh/sloppy:dev", []string{"/sloppy", "-namespace=" + ns, "-bug=" + bug}
	create(t, pod)
	pod = ready(t, ns, pod.Name)
	round := func() { // from watch to watch
		t.Helper()
		since := time.Now()
		until(t, "a round", func(context.Context) error {
			requests, err := cluster.Requests(audit.Callers{Pods: []string{ns + "/" + pod.Name}, Since: since})
			return errors.Join(err, orElse(slices.ContainsFunc(requests, func(r audit.Request) bool { return r.Verb == "watch" }), "it is not over"))
		})
	}
	served(stays)
	for i, cm := range leaving {
		remove(t, cm)
		patch(t, stays, fmt.Sprintf(`{"data": {"n": "%d"}}`, i))
	}
	if f != nil {
		until(t, "the fault", func(context.Context) error {
			n := sum(scrapeAgent(t, pod.Spec.NodeName), "ctrlmesh_faults_injected_total", map[string]string{"namespace": ns})
			return orElse(n > 0, "it is not injected")
		})
		round()
		remove(t, f)
	}
	if bug != "" && f != nil {
		round()
		found, err := wrong(t.Context())
		require.NoError(t, err)
		require.NotEmpty(t, found)
		t.Log(found)
		return
	}
	served(stays)
	until(t, "all to be right", func(ctx context.Context) error {
		found, err := wrong(ctx)
		if err == nil && len(found) > 0 {
			err = fmt.Errorf("%s", found)
		}
		return err
	})
}
