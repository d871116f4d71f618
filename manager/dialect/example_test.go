package dialect_test

import (
	"fmt"

	"sigs.k8s.io/yaml"

	kruise "github.com/ctrlmesh/ctrlmesh/api/kruise/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/dialect"
)

// A VirtualApp becomes a ShardingConfig with a root, and its subsets become shards.
func ExampleVirtualApp() {
	app := &kruise.VirtualApp{}
	if err := yaml.UnmarshalStrict([]byte(`
metadata: {namespace: ns, name: operator}
spec:
  selector: {matchLabels: {app: operator}}
  configuration: {controller: {leaderElectionName: lock}}
  route:
    subRules:
    - name: canaries
      match:
      - namespaceRegex: ^canary.*
  subsets:
  - {name: v2, labels: {version: v2}, routeRules: [canaries]}
`), app); err != nil {
		fmt.Println(err)
		return
	}
	translation, errs := dialect.VirtualApp(app)
	root := translation.Config.Spec.Root
	if len(errs) > 0 {
		fmt.Println(errs.ToAggregate())
		return
	}
	fmt.Println("lock:", translation.Config.Spec.Controller.LeaderElectionName)
	for _, subset := range root.Subsets {
		fmt.Println("shard:", root.Prefix+"-"+subset.Name, subset.PodLabels, subset.Namespaces[0].Pattern)
	}
	for _, warning := range translation.Warnings {
		fmt.Println("warning:", warning)
	}
	// Output:
	// lock: lock
	// shard: operator-v2 map[version:v2] ^canary.*
	// warning: spec.subsets: every subset reads cluster-scoped objects, where openkruise serves them to the default subset alone
}
