package chart

import (
	"context"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/admission/initializer"
	"k8s.io/apiserver/pkg/admission/plugin/policy/mutating"
	"k8s.io/apiserver/pkg/admission/plugin/policy/validating"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/apiserver/pkg/util/compatibility"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/client-go/discovery"
	dynamicfake "k8s.io/client-go/dynamic/fake"
	"k8s.io/client-go/informers"
	kubefake "k8s.io/client-go/kubernetes/fake"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/openapi"
	"k8s.io/client-go/openapi/openapitest"

	"github.com/ctrlmesh/ctrlmesh/manager/origin"
)

const managerUser = "system:serviceaccount:" + meshSpace + ":ctrlmesh-manager"

// apiserver evaluates the admission policies of the manifests, by the plugins of the apiserver.
type apiserver struct {
	*kubefake.Clientset
	mutating   *mutating.Plugin
	validating *validating.Plugin
	// denies reports whether a request that a policy asks about is not authorized; nil denies none.
	denies func(authorizer.Attributes) bool
}

// Folders of the policies, and those for versions of Kubernetes without mutating ones.
var (
	since136  = []string{"manager", "policies"}
	before136 = []string{"manager"}
)

// newAPIServer returns an apiserver with the policies of some folders, and with objects.
func newAPIServer(t *testing.T, dirs []string, more ...runtime.Object) *apiserver {
	t.Helper()
	for _, dir := range dirs {
		for _, o := range kustomized(t, filepath.Join(deployDir, dir)) {
			more = append(more, typed(t, o)...)
		}
	}
	var builtins, custom []runtime.Object
	for _, o := range more {
		if _, ok := o.(*unstructured.Unstructured); ok {
			custom = append(custom, o)
		} else {
			builtins = append(builtins, o)
		}
	}
	s := &apiserver{Clientset: kubefake.NewClientset(builtins...)}
	var err error
	s.mutating, err = mutating.NewPlugin(nil)
	require.NoError(t, err)
	s.validating, err = validating.NewPlugin(nil)
	require.NoError(t, err)
	client := schemaClient{s.Clientset}
	factory := informers.NewSharedInformerFactory(client, 0)
	mapper := meta.NewDefaultRESTMapper(nil)
	mapper.Add(admissionv1.SchemeGroupVersion.WithKind("MutatingWebhookConfiguration"), meta.RESTScopeRoot)
	apps := origin.VirtualApp.GroupVersion().WithResource("virtualapps")
	mapper.Add(origin.VirtualApp, meta.RESTScopeNamespace)
	dynamic := dynamicfake.NewSimpleDynamicClientWithCustomListKinds(runtime.NewScheme(), map[schema.GroupVersionResource]string{apps: "VirtualAppList"}, custom...)
	common := initializer.New(client, dynamic, factory, s,
		utilfeature.DefaultFeatureGate, compatibility.DefaultBuildEffectiveVersion(), t.Context().Done(), mapper)
	for _, plugin := range []interface {
		admission.Interface
		admission.InitializationValidator
	}{s.mutating, s.validating} {
		common.Initialize(plugin)
		require.NoError(t, plugin.ValidateInitialization())
	}
	factory.Start(t.Context().Done())
	factory.WaitForCacheSync(t.Context().Done())
	return s
}

// typed returns a policy, its binding or a webhook configuration as the apiserver stores it;
// nothing for other kinds.
func typed(t *testing.T, o *unstructured.Unstructured) []runtime.Object {
	t.Helper()
	if o.GroupVersionKind().Group != admissionv1.GroupName {
		return nil
	}
	out, err := clientgoscheme.Scheme.New(o.GroupVersionKind())
	require.NoError(t, err)
	require.NoError(t, runtime.DefaultUnstructuredConverter.FromUnstructured(o.Object, out))
	switch p := out.(type) {
	case *admissionv1.ValidatingAdmissionPolicy:
		complete(p.Spec.MatchConstraints)
	case *admissionv1.MutatingAdmissionPolicy:
		complete(p.Spec.MatchConstraints)
	}
	return []runtime.Object{out}
}

// complete sets what the apiserver sets by default.
func complete(m *admissionv1.MatchResources) {
	if m.NamespaceSelector == nil {
		m.NamespaceSelector = &metav1.LabelSelector{}
	}
	if m.ObjectSelector == nil {
		m.ObjectSelector = &metav1.LabelSelector{}
	}
	m.MatchPolicy = new(admissionv1.Equivalent)
	for _, rules := range [][]admissionv1.NamedRuleWithOperations{m.ResourceRules, m.ExcludeResourceRules} {
		for i := range rules {
			if rules[i].Scope == nil {
				rules[i].Scope = new(admissionv1.AllScopes)
			}
		}
	}
}

// request is a write of an object.
type request struct {
	by          string
	resource    schema.GroupVersionResource
	subresource string
	old, object runtime.Object
}

// admit returns the object as the policies leave it, or their refusal.
func (s *apiserver) admit(t *testing.T, r request) (*unstructured.Unstructured, error) {
	t.Helper()
	object := untyped(t, r.object)
	op, old := admission.Create, runtime.Object(nil)
	if r.old != nil {
		op, old = admission.Update, untyped(t, r.old)
	}
	attributes := admission.NewAttributesRecord(object, old, object.GroupVersionKind(), object.GetNamespace(), object.GetName(),
		r.resource, r.subresource, op, nil, false, &user.DefaultInfo{Name: r.by})
	interfaces := admission.NewObjectInterfacesFromScheme(clientgoscheme.Scheme)
	var err error
	require.Eventually(t, func() bool {
		err = s.mutating.Admit(t.Context(), attributes, interfaces)
		return !apierrors.IsServiceUnavailable(err) // until it knows the schemas
	}, 10*time.Second, 10*time.Millisecond)
	if err == nil {
		err = s.validating.Validate(t.Context(), attributes, interfaces)
	}
	return object, err
}

func untyped(t *testing.T, o runtime.Object) *unstructured.Unstructured {
	t.Helper()
	if u, ok := o.(*unstructured.Unstructured); ok {
		return u.DeepCopy()
	}
	content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(o)
	require.NoError(t, err)
	u := &unstructured.Unstructured{Object: content}
	kinds, _, err := clientgoscheme.Scheme.ObjectKinds(o)
	require.NoError(t, err)
	u.SetGroupVersionKind(kinds[0])
	return u
}

// requireRefused requires that a policy refuses a request with a message.
func (s *apiserver) requireRefused(t *testing.T, r request, says string) {
	t.Helper()
	_, err := s.admit(t, r)
	require.ErrorContains(t, err, says)
}

// requireAllowed requires that the policies allow a request.
func (s *apiserver) requireAllowed(t *testing.T, r request) {
	t.Helper()
	_, err := s.admit(t, r)
	require.NoError(t, err)
}

// Authorize answers policies that ask whether the user may do something else.
func (s *apiserver) Authorize(_ context.Context, a authorizer.Attributes) (authorizer.Decision, string, error) {
	if s.denies != nil && s.denies(a) {
		return authorizer.DecisionNoOpinion, "", nil
	}
	return authorizer.DecisionAllow, "", nil
}

// schemaClient has a schema for each group and version.
type schemaClient struct{ *kubefake.Clientset }

func (c schemaClient) Discovery() discovery.DiscoveryInterface {
	return schemaDiscovery{c.Clientset.Discovery()}
}

type schemaDiscovery struct{ discovery.DiscoveryInterface }

func (schemaDiscovery) OpenAPIV3() openapi.Client {
	c := openapitest.NewFakeClient()
	for _, gv := range append(clientgoscheme.Scheme.PrioritizedVersionsAllGroups(), foos.GroupVersion()) {
		path := "apis/" + gv.String()
		if gv.Group == corev1.GroupName {
			path = "api/" + gv.Version
		}
		c.PathsMap[path] = emptySchema{openapitest.FakeGroupVersion{GVSpec: []byte(`{"components":{"schemas":{}}}`)}}
	}
	return c
}

type emptySchema struct{ openapitest.FakeGroupVersion }

func (emptySchema) ServerRelativeURL() string { return "" }

// foos are custom resources.
var foos = schema.GroupVersionResource{Group: "example.com", Version: "v1", Resource: "foos"}

// resourceOf returns the resource of a built-in kind.
func resourceOf(kind schema.GroupVersionKind) schema.GroupVersionResource {
	plural, _ := meta.UnsafeGuessKindToResource(kind)
	return plural
}

// builtin are the kinds of Kubernetes in their preferred versions, sorted.
func builtin() (out []schema.GroupVersionKind) {
	for _, gv := range clientgoscheme.Scheme.PrioritizedVersionsAllGroups() {
		for kind, of := range clientgoscheme.Scheme.KnownTypes(gv) {
			_, isObject := reflect.TypeAssert[metav1.Object](reflect.New(of))
			if isObject && !strings.HasSuffix(kind, "List") {
				out = append(out, gv.WithKind(kind))
			}
		}
	}
	slices.SortFunc(out, func(a, b schema.GroupVersionKind) int { return strings.Compare(a.String(), b.String()) })
	return out
}
