package compile

import (
	"bytes"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/yaml"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/proxy/limit"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
)

// The example of a cap leaves no writes without one.
func TestTheCapCapsAllWrites(t *testing.T) {
	data, err := os.ReadFile("../../deploy/examples/breaker-cap.yaml")
	require.NoError(t, err)
	rules := Rules{Now: time.Now()}
	for doc := range bytes.SplitSeq(data, []byte("\n---\n")) {
		c := &v1alpha1.CircuitBreaker{}
		require.NoError(t, yaml.UnmarshalStrict(doc, c))
		c.UID = types.UID(c.Name)
		rules.Breakers = append(rules.Breakers, c)
	}
	require.Len(t, rules.Breakers, 2)
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "operator-demo", Name: "p", UID: "p", Labels: map[string]string{v1alpha1.EnableProxyLabel: "true", "app": "operator-demo"}}}
	limits, err := limit.Compile(Compile(nil, []*corev1.Pod{pod}, nil, rules).Policies["p"].Traffic, limit.NewStore(), time.Now())
	require.NoError(t, err)
	now := time.Now()
	limits.Enforce(now)
	for _, subresource := range []string{"", "status"} {
		of := limits.OfKind(match.Kind{Verb: "update", Group: "apps", Resource: "deployments", Subresource: subresource})
		passed := 0
		for range 100 {
			if ticket, refusal := of.Take(now, &match.Object{Namespace: "a", Name: "b"}, ""); refusal == nil {
				passed++
				ticket.Done(now, limit.Outcome{})
			}
		}
		require.LessOrEqual(t, passed, 20, subresource)
		now = now.Add(time.Minute)
	}
}
