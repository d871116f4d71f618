package compile_test

import (
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
)

// FuzzPatterns renders any URL and any content, and matches any host and path with what
// becomes of them: agents can read every policy that pods are sent.
func FuzzPatterns(f *testing.F) {
	for _, s := range []string{"https://api.example.com:8443/v1/*", "*.example.com", "[::1]:80/x", `.*\.evil\.com/(a|b)+`, "(", `\Qa`, `a\/b`, "*"} {
		f.Add(s, "api.example.com", "/v1/a")
	}
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
		Namespace: "ns", Name: "pod", UID: "1", Labels: map[string]string{v1alpha1.EnableProxyLabel: "true"},
	}}
	f.Fuzz(func(t *testing.T, pattern, host, path string) {
		c := &v1alpha1.CircuitBreaker{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "c"}}
		c.Spec.Selector = &metav1.LabelSelector{}
		c.Spec.RateLimitings = []v1alpha1.Limiting{{
			Name: "url", RestRules: []v1alpha1.RestRule{{URL: pattern}}, TriggerPolicy: v1alpha1.TriggerForceOpened,
		}}
		for _, kind := range []v1alpha1.ContentType{v1alpha1.ContentNormal, v1alpha1.ContentPrefix, v1alpha1.ContentRegexp} {
			c.Spec.TrafficInterceptRules = append(c.Spec.TrafficInterceptRules, v1alpha1.TrafficInterceptRule{
				Name: string(kind), InterceptType: v1alpha1.InterceptBlacklist, ContentType: kind, Contents: []string{pattern},
			})
		}
		rendered := compile.Compile(nil, []*corev1.Pod{pod}, nil, compile.Rules{Breakers: []*v1alpha1.CircuitBreaker{c}}).Policies["1"].Traffic
		for _, b := range rendered.GetBreakers() {
			http := []*meshv1.HttpMatch{}
			for _, r := range b.Rules {
				http = append(http, r.Http...)
			}
			for _, r := range b.Intercepts {
				http = append(http, r.Http...)
			}
			for _, m := range http {
				u, err := match.NewURL(m)
				require.NoError(t, err, pattern)
				u.Match(&match.HTTP{Scheme: "http", Host: host, Port: 80, Method: "GET", Path: path})
			}
		}
	})
}
