package reviews

import (
	"context"
	"errors"
	"fmt"
	"net"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
	v2 "github.com/ctrlmesh/ctrlmesh/tests/operators/reviewer/v2"
)

const (
	image      = "localhost/ctrlmesh/reviewer:dev"
	shellImage = "localhost/busybox:1" // has nc, too
	service    = "reviewer"            // of the webhooks, its Secret, and the value of operatorLabel
	configName = "reviewer"
	lock       = "reviewer-leader"
	crdName    = "papers.reviewer.example.com"
	certDir    = "/certificate"
	gateDir    = "/gate"

	appLabel      = "app"
	operatorLabel = "operator"    // of the pods that the Service selects
	versionLabel  = "reviewed-by" // of the namespaces of Next: the operator's namespace

	mutatePath   = "/mutate-reviewer-example-com-v2-paper"
	validatePath = "/validate-reviewer-example-com-v2-paper"
	convertPath  = "/convert"
)

// Install installs the operator in a namespace, in which the service account may do
// everything, and waits until both versions run and own their namespaces. The caller must Remove
// it, also after an error.
func Install(ctx context.Context, c *kube.Cluster, home, account string) (*Site, error) {
	authority, err := newAuthority()
	if err != nil {
		return nil, err
	}
	s := &Site{Cluster: c, Home: home, account: account, authority: authority}
	s.dial = func(ctx context.Context, address string) (net.Conn, error) {
		return c.DialFrom(ctx, s.outside, address)
	}
	return s, kube.InOrder(ctx, s.removeDefinition, s.createShared, s.awaitDefinition, s.createVersions, s.AwaitSettled)
}

// Remove removes the kind, which is not in the namespace of the operator.
func (s *Site) Remove(ctx context.Context) error { return s.removeDefinition(ctx) }

// removeDefinition deletes the kind, also if an interrupted run left it: its conversion calls
// that run's Service.
func (s *Site) removeDefinition(ctx context.Context) error {
	crd := &apiextensionsv1.CustomResourceDefinition{ObjectMeta: metav1.ObjectMeta{Name: crdName}}
	return kube.UntilWithin(ctx, within, "the end of "+crdName, func(ctx context.Context) error {
		err := s.Delete(ctx, crd)
		if err == nil {
			err = errors.New("it is there")
		}
		return client.IgnoreNotFound(err)
	})
}

// createShared creates the objects that both versions use.
func (s *Site) createShared(ctx context.Context) error {
	owners, err := s.OwnedBy(ctx, s.Home)
	if err != nil {
		return err
	}
	data, err := s.certificate()
	if err != nil {
		return err
	}
	meta := metav1.ObjectMeta{Namespace: s.Home, Name: service}
	s.outside = &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: s.Home, Name: "outside"}, Spec: corev1.PodSpec{
		TerminationGracePeriodSeconds: new(int64),
		Containers: []corev1.Container{{
			Name: "client", Image: shellImage, ImagePullPolicy: corev1.PullIfNotPresent, Command: []string{"sleep", "1000000"},
		}},
	}}
	return s.CreateAll(ctx,
		&corev1.Secret{ObjectMeta: meta, Type: corev1.SecretTypeTLS, Data: data},
		&corev1.Service{ObjectMeta: meta, Spec: corev1.ServiceSpec{
			Selector: map[string]string{operatorLabel: service},
			Ports:    []corev1.ServicePort{{Port: 443, TargetPort: intstr.FromInt32(Port)}},
		}},
		s.outside, s.definition(), s.mutating(owners), s.validating(owners), s.config())
}

// certificate returns the contents of the Secret, with a new certificate.
func (s *Site) certificate() (map[string][]byte, error) {
	cert, key, err := s.authority.issue(s.serverName())
	return map[string][]byte{corev1.TLSCertKey: cert, corev1.TLSPrivateKeyKey: key}, err
}

// definition returns the kind. Papers are stored as v2.
func (s *Site) definition() *apiextensionsv1.CustomResourceDefinition {
	version := func(name, field string, storage bool) apiextensionsv1.CustomResourceDefinitionVersion {
		return apiextensionsv1.CustomResourceDefinitionVersion{Name: name, Served: true, Storage: storage, Schema: &apiextensionsv1.CustomResourceValidation{
			OpenAPIV3Schema: &apiextensionsv1.JSONSchemaProps{Type: "object", Properties: map[string]apiextensionsv1.JSONSchemaProps{
				"spec": {Type: "object", Properties: map[string]apiextensionsv1.JSONSchemaProps{field: {Type: "string"}}},
			}},
		}}
	}
	return &apiextensionsv1.CustomResourceDefinition{
		ObjectMeta: metav1.ObjectMeta{Name: crdName},
		Spec: apiextensionsv1.CustomResourceDefinitionSpec{
			Group: v2.GroupVersion.Group, Scope: apiextensionsv1.NamespaceScoped,
			Names:    apiextensionsv1.CustomResourceDefinitionNames{Plural: "papers", Singular: "paper", Kind: "Paper", ListKind: "PaperList"},
			Versions: []apiextensionsv1.CustomResourceDefinitionVersion{version(v1Version, "title", false), version(v2Version, "heading", true)},
			Conversion: &apiextensionsv1.CustomResourceConversion{Strategy: apiextensionsv1.WebhookConverter, Webhook: &apiextensionsv1.WebhookConversion{
				ConversionReviewVersions: []string{"v1"},
				ClientConfig: &apiextensionsv1.WebhookClientConfig{
					CABundle: s.authority.bundle(),
					Service:  &apiextensionsv1.ServiceReference{Namespace: s.Home, Name: service, Path: new(convertPath)},
				},
			}},
		},
	}
}

func (s *Site) clientConfig(path string) admissionregistrationv1.WebhookClientConfig {
	return admissionregistrationv1.WebhookClientConfig{
		CABundle: s.authority.bundle(),
		Service:  &admissionregistrationv1.ServiceReference{Namespace: s.Home, Name: service, Path: &path},
	}
}

// rules returns the rules of a webhook. Papers of v1 are converted for it.
func rules(operations ...admissionregistrationv1.OperationType) []admissionregistrationv1.RuleWithOperations {
	return []admissionregistrationv1.RuleWithOperations{{Operations: operations, Rule: admissionregistrationv1.Rule{
		APIGroups: []string{v2.GroupVersion.Group}, APIVersions: []string{v2Version}, Resources: []string{"papers"},
	}}}
}

func (s *Site) mutating(owners []metav1.OwnerReference) client.Object {
	return &admissionregistrationv1.MutatingWebhookConfiguration{
		ObjectMeta: metav1.ObjectMeta{Name: s.Home, OwnerReferences: owners},
		Webhooks: []admissionregistrationv1.MutatingWebhook{{
			Name: "mutate.reviewer.example.com", ClientConfig: s.clientConfig(mutatePath), Rules: rules(admissionregistrationv1.Create),
			SideEffects: new(admissionregistrationv1.SideEffectClassNone), AdmissionReviewVersions: []string{"v1"},
		}},
	}
}

func (s *Site) validating(owners []metav1.OwnerReference) client.Object {
	return &admissionregistrationv1.ValidatingWebhookConfiguration{
		ObjectMeta: metav1.ObjectMeta{Name: s.Home, OwnerReferences: owners},
		Webhooks: []admissionregistrationv1.ValidatingWebhook{{
			Name: "validate.reviewer.example.com", ClientConfig: s.clientConfig(validatePath),
			Rules:       rules(admissionregistrationv1.Create, admissionregistrationv1.Update),
			SideEffects: new(admissionregistrationv1.SideEffectClassNone), AdmissionReviewVersions: []string{"v1"},
		}},
	}
}

func (s *Site) config() *meshv1alpha1.ShardingConfig {
	return &meshv1alpha1.ShardingConfig{
		ObjectMeta: metav1.ObjectMeta{Namespace: s.Home, Name: configName},
		Spec: meshv1alpha1.ShardingConfigSpec{
			Controller: &meshv1alpha1.ControllerConfig{LeaderElectionName: lock},
			Webhook:    &meshv1alpha1.WebhookConfig{CertDir: certDir, Port: Port},
			Root: &meshv1alpha1.RootConfig{
				Prefix:   configName,
				OnChange: meshv1alpha1.OnChangeRelist,
				TargetSelector: &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{
					{Key: appLabel, Operator: metav1.LabelSelectorOpIn, Values: []string{Next, Stable}},
				}},
				ResourceSelector: []meshv1alpha1.ObjectLimiter{{RelateResources: []meshv1alpha1.ResourceGroup{
					{APIGroups: []string{v2.GroupVersion.Group}, Resources: []string{"papers"}},
				}}},
				Subsets: []meshv1alpha1.Subset{{Name: Next, PodLabels: map[string]string{appLabel: Next},
					Namespaces: []meshv1alpha1.NamespaceMatch{{Selector: &metav1.LabelSelector{MatchLabels: map[string]string{versionLabel: s.Home}}}}}},
			},
		},
	}
}

// awaitDefinition waits until the kind is served and the manager has read the configuration:
// pods that are created before would be in no shard.
func (s *Site) awaitDefinition(ctx context.Context) error {
	return kube.UntilWithin(ctx, within, "the kind and the configuration to be in use", func(ctx context.Context) error {
		crd := s.definition()
		root, err := s.Root(ctx)
		if err := errors.Join(err, s.Get(ctx, client.ObjectKeyFromObject(crd), crd), s.Get(ctx, client.ObjectKeyFromObject(s.outside), s.outside)); err != nil {
			return err
		}
		established := false
		for _, c := range crd.Status.Conditions {
			established = established || c.Type == apiextensionsv1.Established && c.Status == apiextensionsv1.ConditionTrue
		}
		switch {
		case !established:
			return errors.New("the kind is not established")
		case root.Status.ObservedGeneration < root.Generation:
			return errors.New("the manager has not seen the configuration")
		case !kube.PodReady(s.outside):
			return fmt.Errorf("pod %s is not ready", s.outside.Name)
		}
		return nil
	})
}

// createVersions creates a Deployment of each version.
func (s *Site) createVersions(ctx context.Context) error {
	for _, version := range []string{Next, Stable} {
		pod := s.pod(version)
		labels := map[string]string{appLabel: version, operatorLabel: service}
		pod.Labels[operatorLabel] = service
		pod.Spec.TopologySpreadConstraints = []corev1.TopologySpreadConstraint{{ // so that each node has both versions
			MaxSkew: 1, TopologyKey: corev1.LabelHostname, WhenUnsatisfiable: corev1.DoNotSchedule, LabelSelector: &metav1.LabelSelector{MatchLabels: labels},
		}}
		d := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: s.Home, Name: version}, Spec: appsv1.DeploymentSpec{
			Replicas: new(int32(Replicas)), Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: pod.Labels}, Spec: pod.Spec},
		}}
		if err := s.CreateAll(ctx, d); err != nil {
			return err
		}
	}
	return nil
}

// pod returns a pod of a version, which the Service does not select.
func (s *Site) pod(version string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: s.Home, Labels: map[string]string{appLabel: version, meshv1alpha1.EnableProxyLabel: "true"},
		},
		Spec: corev1.PodSpec{
			ServiceAccountName:            s.account,
			TerminationGracePeriodSeconds: new(int64(10)),
			SecurityContext:               &corev1.PodSecurityContext{RunAsNonRoot: new(true), RunAsUser: new(int64(65532)), RunAsGroup: new(int64(65532))},
			Containers: []corev1.Container{{
				Name: "operator", Image: image, ImagePullPolicy: corev1.PullIfNotPresent,
				Args: []string{"-version=" + version, "-cert-dir=" + certDir, fmt.Sprintf("-port=%d", Port), "-lock=" + lock},
				Env: []corev1.EnvVar{{Name: "POD_NAME", ValueFrom: &corev1.EnvVarSource{
					FieldRef: &corev1.ObjectFieldSelector{FieldPath: "metadata.name"},
				}}},
				ReadinessProbe: &corev1.Probe{PeriodSeconds: 1, TimeoutSeconds: 10, ProbeHandler: corev1.ProbeHandler{
					HTTPGet: &corev1.HTTPGetAction{Path: "/readyz", Port: intstr.FromInt32(8081)},
				}},
				VolumeMounts: []corev1.VolumeMount{{Name: "certificate", MountPath: certDir, ReadOnly: true}},
			}},
			Volumes: []corev1.Volume{{Name: "certificate", VolumeSource: corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{SecretName: service}}}},
		},
	}
}

// Single creates a pod of a version to which the apiserver sends no reviews, captured in a
// mode. Its webhooks are served once Open is called.
func (s *Site) Single(ctx context.Context, name, version, mode string) (*corev1.Pod, error) {
	pod := s.pod(version)
	pod.Name, pod.Annotations = name, map[string]string{meshv1alpha1.CaptureAnnotation: mode}
	gate := corev1.VolumeMount{Name: "gate", MountPath: gateDir}
	operator := &pod.Spec.Containers[0]
	operator.Args = append(operator.Args, "-serve-after="+gateDir+"/open")
	operator.VolumeMounts = append(operator.VolumeMounts, gate)
	pod.Spec.Containers = append(pod.Spec.Containers, corev1.Container{
		Name: "gate", Image: shellImage, ImagePullPolicy: corev1.PullIfNotPresent, Command: []string{"sleep", "1000000"},
		VolumeMounts: []corev1.VolumeMount{gate},
	})
	pod.Spec.Volumes = append(pod.Spec.Volumes, corev1.Volume{Name: "gate", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}})
	if err := s.CreateAll(ctx, pod); err != nil {
		return nil, err
	}
	return pod, kube.UntilWithin(ctx, within, "pod "+name+" to run", func(ctx context.Context) error {
		if err := s.Get(ctx, client.ObjectKeyFromObject(pod), pod); err != nil {
			return err
		}
		if pod.Status.Phase != corev1.PodRunning || pod.Status.PodIP == "" {
			return fmt.Errorf("it is %s", pod.Status.Phase)
		}
		return nil
	})
}

// Open makes a single pod serve its webhooks, and waits until it is ready.
func (s *Site) Open(ctx context.Context, pod *corev1.Pod) error {
	if _, _, err := s.Exec(ctx, pod.Namespace, pod.Name, "gate", "touch", gateDir+"/open"); err != nil {
		return err
	}
	return kube.UntilWithin(ctx, within, "pod "+pod.Name+" to be ready", func(ctx context.Context) error { return s.Ready(ctx, pod) })
}
