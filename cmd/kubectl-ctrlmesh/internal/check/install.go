package check

import (
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"slices"
	"strings"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/snapshot"
	"github.com/ctrlmesh/ctrlmesh/internal/clip"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/internal/crdschema"
	"github.com/ctrlmesh/ctrlmesh/manager/inject"
)

// Sections of the documentation about what is installed.
const (
	docsRights = "docs/operations.md#rights"
	docsCA     = "docs/operations.md#the-ca-does-not-rotate"
)

// expiresSoon is how long before its end a certificate is reported. The manager replaces a CA after two
// thirds of its life, years before.
const expiresSoon = 30 * 24 * time.Hour

// maxFields is how many fields a finding names.
const maxFields = 3

// definitions checks that the kinds of the mesh are installed with all fields that this version has.
func (f *findings) definitions(s *snapshot.Snapshot) {
	if s.Install.Definitions == nil || !s.Has(snapshot.Definitions(nil)) {
		return
	}
	for _, file := range definitions(servesDialects(s)) {
		name := definitionName(file)
		if is, ok := s.Install.Definitions[name]; ok {
			f.definition(file, is)
		} else {
			f.add(Error, "crd-missing", docsUpgrade, "kubectl apply -k deploy/crd", "CustomResourceDefinition %s does not exist", name)
		}
	}
}

// definition compares a definition with that of this version.
func (f *findings) definition(file string, is apiextensionsv1.CustomResourceDefinition) {
	want, err := crdschema.Definition(file)
	if err != nil {
		f.add(Unknown, "crd-old", docsUpgrade, "report it as a bug", "%v", err)
		return
	}
	of := func(d *apiextensionsv1.CustomResourceDefinition) *apiextensionsv1.JSONSchemaProps {
		version := collect.Find(d.Spec.Versions, func(v apiextensionsv1.CustomResourceDefinitionVersion) bool {
			return v.Name == want.Spec.Versions[0].Name
		})
		if version == nil || version.Schema == nil {
			return nil
		}
		return version.Schema.OpenAPIV3Schema
	}
	lacking := missingFields(of(want), of(&is), "")
	if len(lacking) == 0 {
		return
	}
	slices.Sort(lacking)
	f.add(Error, "crd-old", docsUpgrade, "kubectl apply -k deploy/crd of the version that runs, or use the plugin of that version", "CustomResourceDefinition %s lacks fields of this version: %s", is.Name, clip.Join(lacking, maxFields, ", "))
}

// missingFields returns the paths of fields of a schema that another one lacks. It does not list fields
// within fields that are missing.
func missingFields(want, is *apiextensionsv1.JSONSchemaProps, at string) (out []string) {
	if want == nil {
		return nil
	}
	if is == nil {
		return []string{strings.TrimPrefix(at, ".")}
	}
	for name, p := range want.Properties {
		if other, ok := is.Properties[name]; ok {
			out = append(out, missingFields(&p, &other, at+"."+name)...)
		} else {
			out = append(out, strings.TrimPrefix(at+"."+name, "."))
		}
	}
	if want.Items != nil && want.Items.Schema != nil && is.Items != nil {
		out = append(out, missingFields(want.Items.Schema, is.Items.Schema, at+"[]")...)
	}
	return out
}

// webhook is what both kinds of webhooks have in common.
// reinstall restores what an installation has. The command depends on how the mesh was installed.
const reinstall = "install this version again as before: by helm upgrade --reset-then-reuse-values, or by kubectl apply of its manifests"

type webhook struct {
	name   string
	ca     []byte
	policy *admissionv1.FailurePolicyType
}

// webhooks checks the webhook configurations.
func (f *findings) webhooks(s *snapshot.Snapshot) {
	if !s.Has(snapshot.Admission(nil, nil, nil)) || s.Install.Mutating == nil {
		return
	}
	mutating, validating := mutatingWebhooks, validatingWebhooks
	configurations := []string{"ctrlmesh", "ctrlmesh-stamp"}
	if servesDialects(s) {
		mutating, validating = slices.Concat(mutating, mutatingDialectWebhooks), slices.Concat(validating, validatingDialectWebhooks)
		configurations = mutatingNames
	}
	for _, name := range configurations {
		is, ok := s.Install.Mutating[name]
		if !ok {
			f.add(Error, "webhook-missing", docsUpgrade, reinstall, "MutatingWebhookConfiguration %s does not exist", name)
			continue
		}
		all := collect.Map(is.Webhooks, func(w admissionv1.MutatingWebhook) webhook {
			return webhook{w.Name, w.ClientConfig.CABundle, w.FailurePolicy}
		})
		if name == "ctrlmesh" {
			f.configuration(s, "MutatingWebhookConfiguration", mutating, all)
		}
	}
	is, ok := s.Install.Validating["ctrlmesh"]
	if !ok {
		f.add(Error, "webhook-missing", docsUpgrade, reinstall, "ValidatingWebhookConfiguration ctrlmesh does not exist")
		return
	}
	all := collect.Map(is.Webhooks, func(w admissionv1.ValidatingWebhook) webhook {
		return webhook{w.Name, w.ClientConfig.CABundle, w.FailurePolicy}
	})
	f.configuration(s, "ValidatingWebhookConfiguration", validating, all)
}

// configuration checks the webhooks of configuration ctrlmesh of a kind.
func (f *findings) configuration(s *snapshot.Snapshot, kind string, expected []string, all []webhook) {
	var severity Severity
	untrusted := ""
	for _, name := range expected {
		is := collect.Find(all, func(w webhook) bool { return w.name == name })
		if is == nil {
			f.add(Error, "webhook-missing", docsUpgrade, reinstall, "%s ctrlmesh has no webhook %s", kind, name)
			continue
		}
		if p := is.policy; p != nil && *p != admissionv1.Fail {
			f.add(Error, "webhook-policy", docsUpgrade, reinstall+": with this policy, what the webhook refuses is admitted while the manager is away",
				"webhook %s has failurePolicy %s, and not Fail", name, *p)
		}
		if worse, problem := expiry(is.ca, s.Now); untrusted == "" {
			severity, untrusted = worse, problem
		}
	}
	if untrusted != "" {
		f.add(severity, "webhook-ca", docsCA, "see whether the manager runs and may update the configuration: it writes the CA", "the caBundle of %s ctrlmesh %s", kind, untrusted)
	}
}

// policies checks that the admission policies exist and are enforced.
func (f *findings) policies(s *snapshot.Snapshot) {
	if !s.Has(snapshot.Admission(nil, nil, nil)) || s.Install.Policies == nil {
		return
	}
	for _, name := range policyNames {
		policy, exists := s.Install.Policies[name]
		binding, bound := s.Install.Bindings[name]
		switch {
		case !exists:
			f.add(Error, "policy-missing", docsRights, reinstall, "ValidatingAdmissionPolicy %s does not exist", name)
		case !bound:
			f.add(Error, "policy-missing", docsRights, reinstall, "ValidatingAdmissionPolicyBinding %s does not exist, so that its policy is not enforced", name)
		case !slices.Contains(binding.Spec.ValidationActions, admissionv1.Deny):
			f.add(Error, "policy-not-enforced", docsRights, reinstall, "ValidatingAdmissionPolicyBinding %s does not deny", name)
		case policy.Spec.FailurePolicy != nil && *policy.Spec.FailurePolicy != admissionv1.Fail:
			f.add(Error, "policy-not-enforced", docsRights, reinstall, "ValidatingAdmissionPolicy %s has failurePolicy %s, and not Fail", name, *policy.Spec.FailurePolicy)
		}
	}
}

// authorities checks the CAs of the mesh.
func (f *findings) authorities(s *snapshot.Snapshot) {
	const restart = "see the log of the manager: it creates what is missing, and replaces a CA before it expires"
	if s.Has(snapshot.Keys) && s.Install.Secrets != nil {
		for _, name := range snapshot.Secrets {
			if !s.Install.Secrets[name] {
				f.add(Error, "ca-missing", docsCA, restart, "Secret %s/%s does not exist", s.Namespace, name)
			}
		}
	}
	if !s.Has(snapshot.Certificates) || s.Install.Bundles == nil {
		return
	}
	if c := s.Install.ManagerCA; c == nil {
		f.add(Error, "ca-missing", docsCA, restart, "ConfigMap %s/%s does not exist, so that agents cannot verify the manager", s.Namespace, meshv1.ManagerCAConfigMap)
	} else if severity, problem := expiry([]byte(c.Data[meshv1.ManagerCAKey]), s.Now); problem != "" {
		f.add(severity, "ca-expiring", docsCA, restart, "the certificate in ConfigMap %s/%s %s", s.Namespace, c.Name, problem)
	}
	for _, name := range bundlesOf(s) {
		bundle, ok := s.Install.Bundles[name]
		if !ok {
			f.add(Error, "ca-missing", docsCA, "see the condition Degraded of the ShardingConfigs there: a quota or a policy may refuse the ConfigMap", "ConfigMap %s does not exist, which labelled pods mount", name)
		} else if severity, problem := expiry([]byte(bundle.Data["ca.crt"]), s.Now); problem != "" {
			f.add(severity, "ca-expiring", docsCA, restart, "the certificate in ConfigMap %s %s", name, problem)
		}
	}
}

// bundlesOf returns the ConfigMaps with CAs that labelled pods mount, sorted.
func bundlesOf(s *snapshot.Snapshot) (out []types.NamespacedName) {
	add := func(pod *corev1.Pod, bundle string) {
		if name := (types.NamespacedName{Namespace: pod.Namespace, Name: bundle}); bundle != "" && !slices.Contains(out, name) {
			out = append(out, name)
		}
	}
	for i := range s.Pods {
		pod := &s.Pods[i]
		add(pod, inject.BundleOf(pod.Annotations[v1alpha1.TrustAnnotation]))
		if pod.Annotations[v1alpha1.EgressTrustAnnotation] == "true" {
			add(pod, inject.EgressBundle)
		}
	}
	slices.SortFunc(out, func(a, b types.NamespacedName) int { return strings.Compare(a.String(), b.String()) })
	return out
}

// expiry says what is wrong with the first certificate of a bundle, which signs; empty if nothing is.
func expiry(bundle []byte, now time.Time) (severity Severity, problem string) {
	block, _ := pem.Decode(bundle)
	if block == nil {
		return Error, "has no certificate"
	}
	c, err := x509.ParseCertificate(block.Bytes)
	switch {
	case err != nil:
		return Error, "has an invalid certificate"
	case now.After(c.NotAfter):
		return Error, fmt.Sprintf("expired at %s", c.NotAfter.UTC().Format(time.RFC3339))
	case now.Add(expiresSoon).After(c.NotAfter):
		return Warning, fmt.Sprintf("expires at %s", c.NotAfter.UTC().Format(time.RFC3339))
	}
	return "", ""
}
