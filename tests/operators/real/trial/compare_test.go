package trial

import (
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"
)

const recordedPod = `
apiVersion: v1
kind: Pod
metadata:
  name: tracked-5d8c7f9b6d-x7k2p
  generateName: tracked-5d8c7f9b6d-
  namespace: amber-reference
  uid: 3f0c2f54-6c8e-4d7b-9d0a-0b1c2d3e4f50
  resourceVersion: "812"
  creationTimestamp: "2026-11-22T10:00:00Z"
  ownerReferences: [{apiVersion: apps/v1, kind: ReplicaSet, name: tracked-5d8c7f9b6d, uid: 11111111-6c8e-4d7b-9d0a-0b1c2d3e4f50}]
spec:
  nodeName: node1
  containers: [{name: pause, image: "localhost/pause:1"}]
status:
  phase: Running
  hostIP: 10.99.0.11
  podIP: 10.244.1.7
  conditions:
  - {type: Ready, status: "True", lastTransitionTime: "2026-11-22T10:00:02Z"}
  - {type: PodScheduled, status: "True", lastTransitionTime: "2026-11-22T10:00:01Z"}
`

// The same pod in another run.
var otherRun = strings.NewReplacer(
	"x7k2p", "b9z4w", "3f0c2f54", "99999999", "11111111", "22222222", `"812"`, `"4711"`, "10:00", "11:37", "node1", "node2",
	"10.99.0.11", "10.99.0.12", "10.244.1.7", "10.244.2.9",
	"namespace: amber-reference", "namespace: amber-adopted\n  labels: {ctrlmesh.kusionstack.io/control: \"true\"}",
	"phase: Running", "phase: Running\n  resources: {limits: {memory: 9007199254740988Ki}}",
)

func object(t *testing.T, text string) *unstructured.Unstructured {
	t.Helper()
	obj := &unstructured.Unstructured{}
	require.NoError(t, yaml.Unmarshal([]byte(text), &obj.Object))
	return obj
}

func stateOf(t *testing.T, objects ...string) endState {
	t.Helper()
	state := endState{}
	for _, text := range objects {
		name, normal := normalise(object(t, text))
		state["Pod "+name] = append(state["Pod "+name], normal)
	}
	return state
}

func TestEndStatesOfTwoRunsAreEqual(t *testing.T) {
	want := []endState{stateOf(t, recordedPod)}
	require.Empty(t, differences(want, []endState{stateOf(t, otherRun.Replace(recordedPod))}))

	reordered := object(t, otherRun.Replace(recordedPod))
	conditions, _, err := unstructured.NestedSlice(reordered.Object, "status", "conditions")
	require.NoError(t, err)
	conditions[0], conditions[1] = conditions[1], conditions[0]
	require.NoError(t, unstructured.SetNestedSlice(reordered.Object, conditions, "status", "conditions"))
	name, text := normalise(reordered)
	require.Empty(t, differences(want, []endState{{"Pod " + name: {text}}}))
}

func TestEndStatesShowWhatDiffers(t *testing.T) {
	want := []endState{stateOf(t, recordedPod)}
	for name, got := range map[string]endState{
		"not in the reference": stateOf(t, recordedPod, recordedPod),
		"missing":              stateOf(t),
		"Pending":              stateOf(t, strings.Replace(recordedPod, "phase: Running", "phase: Pending", 1)),
		`"False"`:              stateOf(t, strings.Replace(recordedPod, `Ready, status: "True"`, `Ready, status: "False"`, 1)),
		"other:1":              stateOf(t, strings.Replace(recordedPod, "pause:1", "other:1", 1)),
	} {
		diff := differences(want, []endState{got})
		require.Len(t, diff, 1, name)
		require.Contains(t, diff[0], name)
		require.Contains(t, diff[0], "amber, Pod tracked-5d8c7f9b6d-<random>")
	}
}

func TestElapsedTextsAreEqual(t *testing.T) {
	young := "status: {message: not yet}\n" + thing("metadata: {name: a, namespace: ns}")
	old := "status: {message: failed}\n" + thing("metadata: {name: a, namespace: ns}")
	of := func(text string, elapsed ...string) string {
		_, normal := normalise(object(t, text), elapsed...)
		return normal
	}
	require.NotEqual(t, of(young), of(old))
	require.Equal(t, of(young, "not yet", "failed"), of(old, "not yet", "failed"))
}

func TestNamesAreNormalised(t *testing.T) {
	for name, want := range map[string]string{
		"metadata: {name: running, namespace: amber-reference}":                                               "running",
		"metadata: {name: amber-reference-x, namespace: amber-reference}":                                     "<namespace>-x",
		"metadata: {name: tracked-x7k2p, namespace: ns, ownerReferences: [{name: tracked}]}":                  "tracked-<random>",
		"metadata: {name: tracked-small, namespace: ns, ownerReferences: [{name: tracked}]}":                  "tracked-small",
		"metadata: {name: running-h5k2w, generateName: running-, namespace: ns, labels: {of: running-h5k2w}}": "running-<random>",
	} {
		got, text := normalise(object(t, thing(name)))
		require.Equal(t, want, got)
		require.NotContains(t, text, "h5k2w")
	}
}

// thing makes an object of its metadata.
func thing(metadata string) string { return "apiVersion: v1\nkind: Thing\n" + metadata }

func TestStepsOfADeploymentAreNotCompared(t *testing.T) {
	deployment := func(reason, status string) string {
		_, text := normalise(object(t, `
metadata: {name: tracked}
status: {conditions: [{type: Progressing, status: "`+status+`", reason: `+reason+`, message: "ReplicaSet: `+reason+`"}]}
`))
		return text
	}
	require.Equal(t, deployment("ReplicaSetUpdated", "True"), deployment("NewReplicaSetCreated", "True"))
	require.NotEqual(t, deployment("ReplicaSetUpdated", "True"), deployment("ReplicaSetUpdated", "False"))
}

// The garbage collector may take longer than an end state must stay the same.
func TestGarbageIsNoEndState(t *testing.T) {
	pod, set := unstructured.Unstructured{}, unstructured.Unstructured{}
	require.NoError(t, yaml.Unmarshal([]byte(recordedPod), &pod.Object))
	set.SetUID(pod.GetOwnerReferences()[0].UID)
	ofPods, ofBoth := kinds("", "v1", "Pod"), slices.Concat(kinds("", "v1", "Pod"), kinds("apps", "v1", "ReplicaSet"))

	require.Nil(t, orphan([]unstructured.Unstructured{set, pod}, ofBoth))
	require.Nil(t, orphan([]unstructured.Unstructured{pod}, ofPods), "its owner is not compared")
	require.Equal(t, pod.GetUID(), orphan([]unstructured.Unstructured{pod}, ofBoth).GetUID())
}
