package trial

import (
	"testing"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

const deployed = `
apiVersion: apps/v1
kind: Deployment
metadata: {name: controller}
spec:
  replicas: 1
  selector: {matchLabels: {app: controller}}
  template:
    metadata: {labels: {app: controller}}
    spec:
      serviceAccountName: manager
      containers: [{name: manager, image: example.com/controller:v1, args: [--leader-elect]}]
---
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: things.example.com}
---
apiVersion: v1
kind: Namespace
metadata: {name: things}
`

func controller() *Built {
	return &Built{Version: "v1", Operator: &Operator{
		Name: "thing", Kind: deployment, Target: "controller", Images: []Image{{Name: "example.com/controller"}},
	}}
}

// Of what the manifests say, the number of replicas alone changes.
func TestManifestsChangeInReplicasAlone(t *testing.T) {
	b := controller()
	require.NoError(t, b.read([]byte(deployed)))
	published, err := decode([]byte(deployed))
	require.NoError(t, err)
	replicas, _, err := unstructured.NestedInt64(b.target.Object, "spec", "replicas")
	require.NoError(t, err)
	require.EqualValues(t, 2, replicas)
	require.NoError(t, unstructured.SetNestedField(published[0].Object, int64(2), "spec", "replicas"))
	require.ElementsMatch(t, published, b.objects)
	require.Equal(t, "manager", b.account())
}

func TestNamespacesAndDefinitionsComeFirst(t *testing.T) {
	b := controller()
	require.NoError(t, b.read([]byte(deployed)))
	var order []string
	for _, o := range b.objects {
		order = append(order, o.GetKind())
	}
	require.Equal(t, []string{"Namespace", definition, deployment}, order)
}

func TestManifestsOfOtherImagesAreRejected(t *testing.T) {
	b := controller()
	b.Version = "v2"
	require.ErrorContains(t, b.read([]byte(deployed)), "image example.com/controller:v1, which is not built")
	b = controller()
	b.Target = "other"
	require.ErrorContains(t, b.read([]byte(deployed)), "no Deployment other")
}

func TestImagesHaveTheirRegistry(t *testing.T) {
	for image, want := range map[string]string{
		"fluxcd/source-controller:v1": "docker.io/fluxcd/source-controller:v1",
		"quay.io/a/b:v1":              "quay.io/a/b:v1",
		"localhost/a:v1":              "localhost/a:v1",
		"host:5000/a:v1":              "host:5000/a:v1",
	} {
		require.Equal(t, want, reference(image))
	}
}

// No operator that publishes its manifests has a role or a binding of the trial.
func TestNoOperatorHasRolesByHand(t *testing.T) {
	for _, o := range Catalogue() {
		n, err := (&Built{Operator: o}).rbacByHand()
		require.NoError(t, err)
		require.Zero(t, n, o.Name)
	}
}
