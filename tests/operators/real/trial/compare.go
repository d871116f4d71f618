package trial

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

// endState is the content of a namespace: normalised objects by kind and name.
type endState map[string][]string

// snapshot reads the end states of a set's namespaces, in the order of the set. It fails while there is garbage to collect.
func (t *trial) snapshot(ctx context.Context, set string) (out []endState, err error) {
	for _, namespace := range tenantsOf(set) {
		state := endState{}
		var all []unstructured.Unstructured
		for _, kind := range t.Compared {
			list := &unstructured.UnstructuredList{}
			list.SetGroupVersionKind(kind)
			if err := t.List(ctx, list, client.InNamespace(namespace)); err != nil {
				return nil, fmt.Errorf("listing %s of %s: %w", kind.Kind, namespace, err)
			}
			all = append(all, list.Items...)
			for i := range list.Items {
				name, text := normalise(&list.Items[i], t.Elapsed...)
				key := kind.Kind + " " + name
				state[key] = append(state[key], text)
				slices.Sort(state[key])
			}
		}
		if obj := orphan(all, t.Compared); obj != nil {
			return nil, fmt.Errorf("%s %s/%s still exists, and its owner does not", obj.GetKind(), namespace, obj.GetName())
		}
		out = append(out, state)
	}
	return out, nil
}

// orphan returns an object with an owner of one of the kinds that is not among the objects, which are all of
// these kinds; nil if there is none.
func orphan(objects []unstructured.Unstructured, kinds []schema.GroupVersionKind) *unstructured.Unstructured {
	exists := map[types.UID]bool{}
	for _, obj := range objects {
		exists[obj.GetUID()] = true
	}
	gone := func(owner metav1.OwnerReference) bool {
		return slices.Contains(kinds, schema.FromAPIVersionAndKind(owner.APIVersion, owner.Kind)) && !exists[owner.UID]
	}
	for i := range objects {
		if slices.ContainsFunc(objects[i].GetOwnerReferences(), gone) {
			return &objects[i]
		}
	}
	return nil
}

// settledSnapshot reads end states until they stay the same for longer than changes take.
func (t *trial) settledSnapshot(ctx context.Context, set string, changes time.Duration) ([]endState, error) {
	var last []endState
	err := t.until(ctx, "the end state to stay the same", func(ctx context.Context) error {
		now, err := t.snapshot(ctx, set)
		if err != nil {
			return err
		}
		same := len(last) > 0 && len(differences(last, now)) == 0
		last = now
		if !same {
			_ = kube.Sleep(ctx, max(unchangedFor, 2*changes)) // a change of the operator may take its time
			return fmt.Errorf("it has changed")
		}
		return nil
	})
	return last, err
}

const unchangedFor = 5 * time.Second

// differences returns the objects that two end states do not share, one line each.
func differences(want, got []endState) (out []string) {
	for i := range want {
		keys := maps.Clone(want[i])
		maps.Copy(keys, got[i])
		for _, key := range slices.Sorted(maps.Keys(keys)) {
			a, b := without(want[i][key], got[i][key]), without(got[i][key], want[i][key])
			for n := range max(len(a), len(b)) {
				out = append(out, fmt.Sprintf("%s, %s: %s", words[i%len(words)], key, firstDifference(at(a, n), at(b, n))))
			}
		}
	}
	return out
}

// without returns the elements of a that b lacks, counting repetitions.
func without(a, b []string) (out []string) {
	left := slices.Clone(b)
	for _, s := range a {
		if i := slices.Index(left, s); i >= 0 {
			left = slices.Delete(left, i, i+1)
		} else {
			out = append(out, s)
		}
	}
	return out
}

func at(list []string, i int) string {
	if i < len(list) {
		return list[i]
	}
	return ""
}

// firstDifference returns the place at which two normalised objects begin to differ.
func firstDifference(want, got string) string {
	switch {
	case want == "":
		return "not in the reference"
	case got == "":
		return "missing"
	}
	i := 0
	for i < min(len(want), len(got)) && want[i] == got[i] {
		i++
	}
	excerpt := func(s string) string { return s[max(0, i-60):min(len(s), i+60)] }
	return fmt.Sprintf("...%s... in the reference, ...%s...", excerpt(want), excerpt(got))
}

// Fields that differ between two runs of one operator, by path or by name.
var (
	droppedMetadata = []string{
		"uid", "resourceVersion", "generation", "creationTimestamp", "managedFields", "selfLink", "deletionTimestamp",
	}
	droppedAnnotations = []string{
		"deployment.kubernetes.io/revision", "endpoints.kubernetes.io/last-change-trigger-time",
		"machinedeployment.clusters.x-k8s.io/revision", "machinedeployment.clusters.x-k8s.io/revision-history",
		"prometheus-operator-input-hash", // covers the uid and the generation
	}
	droppedFields = map[string]bool{
		"uid": true, "resourceVersion": true, "observedGeneration": true, "containerID": true, "imageID": true, "generation": true,
		"currentRevision": true, "updateRevision": true, // of a StatefulSet: which of them are equal depends on what came before
		"revision":   true, // of cert-manager: how often a certificate was issued
		"deprecated": true, // of Cluster API: conditions of an older version, which keep the message of a past step
	}
	replacedFields = map[string]string{
		"nodeName": "<node>", "hostIP": "<node>", "ip": "<address>", "podIP": "<address>", "clusterIP": "<address>",
	}
	unordered = map[string]string{ // lists, by the field that orders them; "" for whole elements
		"conditions": "type", "endpoints": "", "addresses": "", "finalizers": "", "subsets": "",
	}

	timePattern = regexp.MustCompile(`\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)`)
	uidPattern  = regexp.MustCompile(`[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}`)
	// suffixPattern is of the random suffixes of generated names: without vowels and digits that look like them.
	suffixPattern  = regexp.MustCompile(`-[bcdfghjklmnpqrstvwxz2456789]{5}\b`)
	addressPattern = regexp.MustCompile(`\b10\.\d+\.\d+\.\d+\b`) // of the test cluster
)

// normalise returns the name and the content of an object without what differs between two
// runs: uids, times, versions, addresses and generated names, and the pairs of elapsed texts.
func normalise(obj *unstructured.Unstructured, elapsed ...string) (name, text string) {
	obj = obj.DeepCopy()
	for _, field := range droppedMetadata {
		unstructured.RemoveNestedField(obj.Object, "metadata", field)
	}
	unstructured.RemoveNestedField(obj.Object, "status", "resources") // of a pod: what the kubelet read last
	labels := obj.GetLabels()
	maps.DeleteFunc(labels, func(key, _ string) bool { return strings.HasPrefix(key, meshv1alpha1.GroupName+"/") })
	if len(labels) == 0 {
		labels = nil
	}
	obj.SetLabels(labels)
	for _, annotation := range droppedAnnotations {
		unstructured.RemoveNestedField(obj.Object, "metadata", "annotations", annotation)
	}
	if len(obj.GetAnnotations()) == 0 {
		obj.SetAnnotations(nil)
	}
	if namespace := obj.GetNamespace(); namespace != "" {
		elapsed = append([]string{namespace, "<namespace>"}, elapsed...)
	}
	n := normaliser{strings.NewReplacer(elapsed...)}
	return n.text(obj.GetName()), mustJSON(n.value("", obj.Object))
}

type normaliser struct{ replacer *strings.Replacer }

func (n normaliser) value(field string, v any) any {
	if fixed, ok := replacedFields[field]; ok && v != "None" && v != "" {
		if _, text := v.(string); text {
			return fixed
		}
	}
	switch v := v.(type) {
	case map[string]any:
		out := map[string]any{}
		for key, element := range v {
			if !droppedFields[key] && !ofLastStep(v, key) {
				out[n.text(key)] = n.value(key, element)
			}
		}
		return out
	case []any:
		return n.list(field, v)
	case string:
		return n.text(v)
	default:
		return v
	}
}

// ofLastStep reports whether a field is of a condition that says by which step a Deployment came to its
// state: changes that follow closely are one step or several.
func ofLastStep(condition map[string]any, field string) bool {
	return condition["type"] == "Progressing" && (field == "reason" || field == "message")
}

func (n normaliser) list(field string, v []any) any {
	out := make([]any, 0, len(v))
	for _, element := range v {
		out = append(out, n.value("", element))
	}
	if by, ok := unordered[field]; ok {
		slices.SortStableFunc(out, func(a, b any) int { return cmp.Compare(sortKey(a, by), sortKey(b, by)) })
	}
	return out
}

func sortKey(v any, field string) string {
	if object, ok := v.(map[string]any); ok && field != "" {
		return fmt.Sprint(object[field])
	}
	return mustJSON(v)
}

func (n normaliser) text(s string) string {
	s = n.replacer.Replace(s)
	s = timePattern.ReplaceAllString(s, "<time>")
	s = uidPattern.ReplaceAllString(s, "<uid>")
	s = suffixPattern.ReplaceAllString(s, "-<random>")
	return addressPattern.ReplaceAllString(s, "<address>")
}

// mustJSON encodes what was decoded from JSON.
func mustJSON(v any) string {
	text, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return string(text)
}
