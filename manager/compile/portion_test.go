package compile

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

// A rule with a share says all that it says without.
func TestASharedRuleIsWhole(t *testing.T) {
	rule := &meshv1.LimitRule{}
	fields := rule.ProtoReflect().Descriptor().Fields()
	for i := range fields.Len() {
		switch f := fields.Get(i); {
		case f.IsList():
			l := rule.ProtoReflect().Mutable(f).List()
			l.Append(l.NewElement())
		case f.Message() != nil:
			rule.ProtoReflect().Mutable(f)
		case f.Kind() == protoreflect.StringKind:
			rule.ProtoReflect().Set(f, protoreflect.ValueOfString("x"))
		case f.Kind() == protoreflect.EnumKind:
			rule.ProtoReflect().Set(f, protoreflect.ValueOfEnum(1))
		case f.Kind() == protoreflect.BoolKind:
			rule.ProtoReflect().Set(f, protoreflect.ValueOfBool(true))
		default:
			rule.ProtoReflect().Set(f, protoreflect.ValueOfUint32(1))
		}
	}
	out := &meshv1.LimitRule{}
	shared(out, rule, &meshv1.Share{Index: 1, Of: 2})
	require.EqualValues(t, 2, out.Share.Of)
	out.Share = rule.Share
	require.True(t, proto.Equal(rule, out), out)
}

// What is as it was is not rendered again, and what is not is.
func TestWhatIsKept(t *testing.T) {
	breaker := sharedBreaker(2)
	injection := &v1alpha1.FaultInjection{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "f", UID: "f", Generation: 1}}
	injection.Spec = v1alpha1.FaultInjectionSpec{Selector: &metav1.LabelSelector{}, HTTPFaultInjections: []v1alpha1.HTTPFaultInjection{{Name: "r", Reset: &v1alpha1.FaultReset{Percent: "1"}}}}
	cache := &Cache{}
	share := meshv1.Share{Index: 0, Of: 2}
	rendered := func() Policy {
		return Compile(nil, sharingPods(1), nil, Rules{Cache: cache, Now: time.Now(),
			Breakers: []*v1alpha1.CircuitBreaker{breaker}, Injections: []*v1alpha1.FaultInjection{injection},
			Share: func(types.NamespacedName, string, string, types.UID) *meshv1.Share {
				return &meshv1.Share{Index: share.Index, Of: share.Of}
			},
		}).Policies["u0"]
	}
	one := rendered()
	two := rendered()
	require.Equal(t, one.Version, two.Version)
	require.Same(t, one.Traffic.Breakers[0], two.Traffic.Breakers[0])
	require.Same(t, one.Traffic.Injections[0].Rules[0], two.Traffic.Injections[0].Rules[0])

	share.Of = 3
	three := rendered()
	require.NotEqual(t, two.Version, three.Version)
	require.EqualValues(t, 2, two.Traffic.Breakers[0].Rules[0].Share.Of)
	require.EqualValues(t, 3, three.Traffic.Breakers[0].Rules[0].Share.Of)
	require.EqualValues(t, 3, three.Traffic.Breakers[0].Rules[1].Share.Of)

	breaker = breaker.DeepCopy()
	breaker.Annotations = map[string]string{v1alpha1.RecoverAnnotation: "1"}
	four := rendered()
	require.NotEmpty(t, four.Traffic.Breakers[0].Rules[0].Recover)
	breaker = breaker.DeepCopy()
	breaker.Spec.RateLimitings[0].Name, breaker.Generation = "another", 2
	injection = injection.DeepCopy()
	injection.Spec.HTTPFaultInjections[0].Name, injection.Generation = "another", 2
	five := rendered()
	require.Equal(t, "another", five.Traffic.Breakers[0].Rules[0].Name)
	require.Equal(t, "another", five.Traffic.Injections[0].Rules[0].Name)
	breaker = breaker.DeepCopy()
	breaker.Labels = map[string]string{v1alpha1.DisableBreakerLabel: ""}
	injection = injection.DeepCopy()
	injection.Spec.Disabled, injection.Generation = true, 3
	require.Nil(t, rendered().Traffic)
	breaker, injection = sharedBreaker(1), injection.DeepCopy()
	breaker.UID = "other"
	rendered()
	require.Len(t, cache.breakers, 1, "what is gone is forgotten")
}

func sharingPods(n int) (out []*corev1.Pod) {
	for i := range n {
		out = append(out, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: fmt.Sprint("p-", i), UID: types.UID(fmt.Sprint("u", i)),
			Labels: map[string]string{v1alpha1.EnableProxyLabel: "true"}}, Spec: corev1.PodSpec{NodeName: "n"}})
	}
	return out
}

func sharedBreaker(rules int) *v1alpha1.CircuitBreaker {
	c := &v1alpha1.CircuitBreaker{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "c", UID: "c", Generation: 1}, Spec: v1alpha1.CircuitBreakerSpec{Selector: &metav1.LabelSelector{}}}
	for i := range rules {
		c.Spec.RateLimitings = append(c.Spec.RateLimitings, v1alpha1.Limiting{Name: fmt.Sprint("r", i), Scope: v1alpha1.LimitScopeWorkload,
			ResourceRules: []v1alpha1.ResourceRule{{APIGroups: []string{"*"}, Resources: []string{"*"}, Verbs: []string{"get"}, Namespaces: []string{"*"}}},
			Bucket:        &v1alpha1.Bucket{Burst: 1, Interval: "1s", Limit: 1}})
	}
	return c
}

// A run of the policies loop where nothing changed, and where all shares did.
func BenchmarkCompileShared(b *testing.B) {
	for name, changes := range map[string]uint32{"same": 0, "anew": 1} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			pods, index, of := sharingPods(2000), map[types.UID]uint32{}, uint32(2000)
			for i, p := range pods {
				index[p.UID] = uint32(i)
			}
			rules := Rules{Cache: &Cache{}, Breakers: []*v1alpha1.CircuitBreaker{sharedBreaker(100)}, Now: time.Now(),
				Share: func(_ types.NamespacedName, _, _ string, uid types.UID) *meshv1.Share {
					return &meshv1.Share{Index: index[uid], Of: of}
				}}
			for b.Loop() {
				Compile(nil, pods, nil, rules)
				of += changes
			}
		})
	}
}

// CircuitBreakers that select nothing.
func BenchmarkCompileIdle(b *testing.B) {
	rules := Rules{Cache: &Cache{}, Now: time.Now()}
	for i := range 10000 {
		c := sharedBreaker(4)
		c.Name, c.UID, c.Namespace = fmt.Sprint(i), types.UID(fmt.Sprint(i)), "other"
		rules.Breakers = append(rules.Breakers, c)
	}
	pods := sharingPods(2000)
	Compile(nil, pods, nil, rules)
	for b.Loop() {
		Compile(nil, pods, nil, rules)
	}
}
