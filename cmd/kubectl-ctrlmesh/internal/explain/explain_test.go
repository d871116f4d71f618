package explain

import (
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ctrlmesh/ctrlmesh/tests/docs"
)

// lists are what an apiserver serves, the core group first.
var lists = []*metav1.APIResourceList{
	{GroupVersion: "v1", APIResources: []metav1.APIResource{
		{Name: "events", SingularName: "event", ShortNames: []string{"ev"}, Kind: "Event", Namespaced: true},
		{Name: "pods", SingularName: "pod", ShortNames: []string{"po"}, Kind: "Pod", Namespaced: true},
		{Name: "pods/status", Kind: "Pod", Namespaced: true},
	}},
	{GroupVersion: "events.k8s.io/v1", APIResources: []metav1.APIResource{{Name: "events", SingularName: "event", Kind: "Event", Namespaced: true}}},
	{GroupVersion: "example.com/v2", APIResources: []metav1.APIResource{{Name: "po", SingularName: "poe", Kind: "Poe"}}},
	{GroupVersion: "example.com/v1", APIResources: []metav1.APIResource{{Name: "po", SingularName: "poe", Kind: "Poe"}}},
}

func TestFind(t *testing.T) {
	for text, want := range map[string]string{
		"events":               "v1 events",
		"ev":                   "v1 events",
		"Event":                "v1 events",
		"events.events.k8s.io": "events.k8s.io/v1 events.events.k8s.io",
		"pods/status":          "v1 pods/status",
		"pods/a":               "v1 pods, object a",
		"po":                   "example.com/v2 po.example.com", // a plural comes before a short name
		"poe.example.com":      "example.com/v2 po.example.com",
		"po.v1.example.com":    "example.com/v1 po.example.com",
		"pos":                  "resource pos: the apiserver serves no such resource; did you mean po?",
		"pods.example.com":     "resource pods.example.com: the apiserver serves no such resource; did you mean pods of group \"\"?",
	} {
		t.Run(text, func(t *testing.T) {
			r, object, err := Find(lists, text)
			if err != nil {
				require.EqualError(t, err, want)
				return
			}
			is := r.apiVersion() + " " + r.String()
			if object != "" {
				is += ", object " + object
			}
			require.Equal(t, want, is)
		})
	}
}

func TestAdviceNamesSectionsOfTheDocumentation(t *testing.T) {
	link := regexp.MustCompile(`docs/\S+#\S+`)
	for _, text := range slices.Concat(slices.Collect(maps.Values(advice)), slices.Collect(maps.Values(adviceBy))) {
		file, anchor, _ := strings.Cut(link.FindString(text), "#")
		require.NotEmpty(t, anchor, text)
		require.True(t, docs.Anchors(t, filepath.Join("../../../..", file))[anchor], text)
	}
}

// A request that no apiserver accepts is refused before anything is read.
func TestCheck(t *testing.T) {
	foos := Resource{Name: "foos", Namespaced: true}
	status := Resource{Name: "foos", Subresource: "status", Namespaced: true}
	namespaces := Resource{Name: "namespaces"}
	for text, q := range map[string]Request{
		"":                                    {Verb: "list", Resource: foos},
		`unknown verb "apply"`:                {Verb: "apply", Resource: foos, Namespace: "a"},
		"deletecollection names no object":    {Verb: "deletecollection", Resource: foos, Namespace: "a", Name: "b"},
		"no apiserver serves get in all":      {Verb: "get", Resource: foos},
		"choose another verb than list":       {Verb: "list", Resource: status, Namespace: "a"},
		"name the Namespace: each belongs to": {Verb: "update", Resource: namespaces},
	} {
		err := q.Check()
		if text == "" {
			require.NoError(t, err)
			continue
		}
		require.ErrorContains(t, err, text)
	}
}
