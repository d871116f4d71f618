package removal

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	kridge "github.com/ctrlmesh/ctrlmesh/api/kridge/v1alpha1"
	kruise "github.com/ctrlmesh/ctrlmesh/api/kruise/v1alpha1"
)

func pod(namespace, name string, labels map[string]string, phase corev1.PodPhase, args ...string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: labels},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Args: args}}},
		Status:     corev1.PodStatus{Phase: phase},
	}
}

func TestRemovalWaitsForConfigurationsPodsAndAgents(t *testing.T) {
	at := metav1.ObjectMeta{Namespace: "team", Name: "x"}
	member := map[string]string{v1alpha1.EnableProxyLabel: "true"}
	agent := map[string]string{"app.kubernetes.io/name": "ctrlmesh-agent"}
	for _, tc := range []struct {
		name    string
		objects []client.Object
		err     string
	}{
		{"nothing is left", nil, ""},
		{"a ShardingConfig exists", []client.Object{&v1alpha1.ShardingConfig{ObjectMeta: at}},
			"1 shardingconfigs exist (team/x): run kubectl delete shardingconfigs -A --all, after removing the label from pods of hand-written shards: they are refused without"},
		{"a CircuitBreaker exists", []client.Object{&v1alpha1.CircuitBreaker{ObjectMeta: at}},
			"1 circuitbreakers exist (team/x): run kubectl delete circuitbreakers -A --all"},
		{"a FaultInjection exists", []client.Object{&v1alpha1.FaultInjection{ObjectMeta: at}},
			"1 faultinjections exist (team/x): run kubectl delete faultinjections -A --all"},
		{"a VirtualApp exists", []client.Object{&kruise.VirtualApp{ObjectMeta: at}},
			"1 virtualapps exist (team/x): run kubectl delete virtualapps -A --all"},
		{"a TrafficPolicy exists", []client.Object{&kruise.TrafficPolicy{ObjectMeta: at}},
			"1 trafficpolicies exist (team/x): run kubectl delete trafficpolicies -A --all"},
		{"a ShardingConfig of Kridge exists", []client.Object{&kridge.ShardingConfig{ObjectMeta: at}},
			"1 shardingconfigs.kridge.kusionstack.io exist (team/x): run kubectl delete shardingconfigs.kridge.kusionstack.io -A --all"},
		{"a labelled pod runs", []client.Object{pod("team", "p", member, corev1.PodRunning)},
			"1 labelled pods exist (team/p): remove the label ctrlmesh.kusionstack.io/enable-proxy from their pod templates, and wait until the pods are replaced"},
		{"a labelled pod has ended", []client.Object{pod("team", "p", member, corev1.PodSucceeded)}, ""},
		{"an agent serves", []client.Object{pod("mesh", "a", agent, corev1.PodRunning, "--pod-dir=/run")},
			"1 agents that redirect exist (mesh/a): upgrade the release with --set agent.cleanup=true --wait"},
		{"an agent has cleaned its node", []client.Object{pod("mesh", "a", agent, corev1.PodRunning, "cleanup", "--wait")}, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			scheme := runtime.NewScheme()
			require.NoError(t, clientgoscheme.AddToScheme(scheme))
			require.NoError(t, v1alpha1.AddToScheme(scheme))
			require.NoError(t, kridge.AddToScheme(scheme))
			require.NoError(t, kruise.AddToScheme(scheme))
			err := Check(t.Context(), fake.NewClientBuilder().WithScheme(scheme).WithObjects(tc.objects...).Build(), "mesh")
			if tc.err == "" {
				require.NoError(t, err)
				return
			}
			require.EqualError(t, err, tc.err)
		})
	}
}

func TestErrorNamesFirstFiveObjects(t *testing.T) {
	var found []string
	for i := range 7 {
		found = append(found, fmt.Sprintf("n/%d", i))
	}
	require.EqualError(t, problem(found, "things", "remove them"), "7 things exist (n/0, n/1, n/2, n/3, n/4 and 2 more): remove them")
}
