package inject

import (
	"context"
	"encoding/json"
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"
	"sigs.k8s.io/yaml"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

func agentService(ips ...string) *corev1.Service {
	return &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "mesh", Name: "ctrlmesh-agent"},
		Spec:       corev1.ServiceSpec{ClusterIPs: ips, Ports: []corev1.ServicePort{{Port: 6443}}},
	}
}

// byAddress is a pod as the ServiceAccount admission leaves it; MORE is the rest
// of the container main.
const byAddress = `
metadata:
  name: p
  namespace: ns
  labels: {ctrlmesh.kusionstack.io/enable-proxy: "true", shard: "0"}
  annotations: {ctrlmesh.kusionstack.io/capture: address}
spec:
  volumes:
  - name: token
    projected:
      defaultMode: 420
      sources:
      - serviceAccountToken: {path: token}
      - configMap: {name: kube-root-ca.crt, items: [{key: ca.crt, path: ca.crt}]}
  - {name: data, emptyDir: {}}
  - {name: secret, secret: {secretName: kubeconfig, defaultMode: 256}}
  - {name: items, secret: {secretName: kubeconfig, items: [{key: a, path: config}]}}
  - {name: map, configMap: {name: kubeconfig, items: [{key: a, path: config}, {key: b, path: more}]}}
  initContainers:
  - {name: first, volumeMounts: [{name: token, mountPath: /var/run/secrets/kubernetes.io/serviceaccount, readOnly: true}]}
  containers:
  - name: main
    volumeMounts: [{name: token, mountPath: /var/run/secrets/kubernetes.io/serviceaccount, readOnly: true}]
  - {name: side, command: [side]}
`

// admit returns the pod that comes out, and that it comes out the same once more.
func admit(t *testing.T, w *Webhook, change func(*corev1.Pod)) (*corev1.Pod, string) {
	t.Helper()
	p := &corev1.Pod{}
	require.NoError(t, yaml.UnmarshalStrict([]byte(byAddress), p))
	change(p)
	in, err := json.Marshal(p)
	require.NoError(t, err)
	r, m := create(t, w, string(in), false)
	if !r.Allowed {
		return nil, r.Result.Message
	}
	raw, err := json.Marshal(m)
	require.NoError(t, err)
	again, _ := create(t, w, string(raw), false)
	require.Empty(t, again.Patches, "once more, as the apiserver does")
	out := &corev1.Pod{}
	require.NoError(t, json.Unmarshal(raw, out))
	return out, ""
}

func addressWebhook(t *testing.T, more ...client.Object) *Webhook {
	return newWebhook(t, append(more, agentService("10.96.0.9"), shard("zero", map[string]string{"shard": "0"}))...)
}

func TestAddressByEnvironment(t *testing.T) {
	out, _ := admit(t, addressWebhook(t), func(p *corev1.Pod) {
		p.Spec.Containers[0].Env = []corev1.EnvVar{
			{Name: "BEFORE", Value: "$(KUBERNETES_SERVICE_HOST)"},
			{Name: "KUBERNETES_SERVICE_HOST", Value: "10.0.0.1"},
			{Name: "AFTER", Value: "x"},
			{Name: "KUBERNETES_SERVICE_PORT", ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: "metadata.name"}}},
		}
	})
	for _, c := range append(out.Spec.InitContainers, out.Spec.Containers...) {
		got := map[string]string{}
		for _, e := range c.Env {
			require.NotContains(t, got, e.Name)
			require.Nil(t, e.ValueFrom)
			got[e.Name] = e.Value
		}
		for name, value := range map[string]string{
			"KUBERNETES_SERVICE_HOST": "10.96.0.9", "KUBERNETES_SERVICE_PORT": "6443", "KUBERNETES_SERVICE_PORT_HTTPS": "6443",
			"KUBERNETES_PORT": "tcp://10.96.0.9:6443", "KUBERNETES_PORT_443_TCP": "tcp://10.96.0.9:6443",
			"KUBERNETES_PORT_443_TCP_PROTO": "tcp", "KUBERNETES_PORT_443_TCP_ADDR": "10.96.0.9", "KUBERNETES_PORT_443_TCP_PORT": "6443",
		} {
			require.Equal(t, value, got[name], "%s of %s", name, c.Name)
		}
	}
	env := out.Spec.Containers[0].Env
	require.Equal(t, []string{"BEFORE", "AFTER"}, []string{env[8].Name, env[9].Name}, "what refers to ours comes after it")
	require.Equal(t, []string{"side"}, out.Spec.Containers[1].Command)
	require.NotContains(t, out.Annotations, v1alpha1.KubeconfigContentAnnotation)
	require.Len(t, out.Spec.Volumes, 5, "nobody reads a kubeconfig")

	v6 := newWebhook(t, agentService("fd00::9", "10.96.0.9"))
	out, _ = admit(t, v6, func(*corev1.Pod) {})
	require.Equal(t, "fd00::9", out.Spec.Containers[0].Env[0].Value)
	require.Equal(t, "tcp://[fd00::9]:6443", out.Spec.Containers[0].Env[3].Value)
}

func TestAddressByKubeconfig(t *testing.T) {
	for _, c := range []struct {
		what   string
		change func(*corev1.Pod, *corev1.Container)
		files  []string
	}{
		{"flag with =", func(_ *corev1.Pod, c *corev1.Container) { c.Args = []string{"--v=2", "--kubeconfig=/etc/op/config"} }, []string{"/etc/op/config"}},
		{"flag and value", func(_ *corev1.Pod, c *corev1.Container) {
			c.Command = []string{"op", "--kubeconfig", "/etc/op//config"}
		}, []string{"/etc/op/config"}},
		{"one dash", func(_ *corev1.Pod, c *corev1.Container) { c.Args = []string{"-kubeconfig", "/config"} }, []string{"/config"}},
		{"over the end of the command", func(_ *corev1.Pod, c *corev1.Container) {
			c.Command, c.Args = []string{"op", "-kubeconfig"}, []string{"/config"}
		}, []string{"/config"}},
		{"empty", func(_ *corev1.Pod, c *corev1.Container) { c.Args = []string{"--kubeconfig=", "--kubeconfig"} }, nil},
		{"others", func(_ *corev1.Pod, c *corev1.Container) {
			c.Args = []string{"--kubeconfig-dir=/x", "kubeconfig=/y", "--", "-"}
		}, nil},
		{"environment", func(_ *corev1.Pod, c *corev1.Container) {
			c.Env = []corev1.EnvVar{{Name: "KUBECONFIG", Value: "/a:/b/c"}}
		}, []string{"/a", "/b/c"}},
		{"both", func(_ *corev1.Pod, c *corev1.Container) {
			c.Env, c.Args = []corev1.EnvVar{{Name: "KUBECONFIG", Value: "/a"}}, []string{"--kubeconfig=/a"}
		}, []string{"/a"}},
		{"an emptyDir", func(_ *corev1.Pod, c *corev1.Container) {
			c.Args = []string{"--kubeconfig=/data/config"}
			c.VolumeMounts = append(c.VolumeMounts, corev1.VolumeMount{Name: "data", MountPath: "/data"})
		}, []string{"/data/config"}},
		{"a file that is a mount", func(_ *corev1.Pod, c *corev1.Container) {
			c.Args = []string{"--kubeconfig=/etc/config"}
			c.VolumeMounts = append(c.VolumeMounts, corev1.VolumeMount{Name: "secret", MountPath: "/etc/config", SubPath: "config"})
		}, []string{"/etc/config"}},
	} {
		t.Run(c.what, func(t *testing.T) {
			var before corev1.Container
			out, msg := admit(t, addressWebhook(t), func(p *corev1.Pod) {
				c.change(p, &p.Spec.Containers[0])
				before = *p.Spec.Containers[0].DeepCopy()
			})
			require.Empty(t, msg)
			main := out.Spec.Containers[0]
			require.Equal(t, before.Args, main.Args)
			require.Equal(t, before.Command, main.Command)
			var files []string
			paths := map[string]bool{}
			for _, m := range main.VolumeMounts {
				require.False(t, paths[m.MountPath], "two mounts at one path are refused")
				paths[m.MountPath] = true
				if m.Name == addressVolume && m.SubPath == kubeconfigFile {
					require.True(t, m.ReadOnly)
					files = append(files, m.MountPath)
				}
			}
			require.Equal(t, c.files, files)
			if c.files == nil {
				return
			}
			require.True(t, paths[addressDir])
			require.Empty(t, out.Spec.Containers[1].VolumeMounts)
			leads(t, out)
		})
	}
}

// leads verifies that the kubeconfig of a pod leads to the agents.
func leads(t *testing.T, p *corev1.Pod) {
	t.Helper()
	cfg, err := clientcmd.Load([]byte(p.Annotations[v1alpha1.KubeconfigContentAnnotation]))
	require.NoError(t, err)
	now := cfg.Contexts[cfg.CurrentContext]
	require.Equal(t, "ns", now.Namespace)
	require.Equal(t, "https://10.96.0.9:6443", cfg.Clusters[now.Cluster].Server)
	require.Equal(t, addressDir+"/ca.crt", cfg.Clusters[now.Cluster].CertificateAuthority)
	require.Equal(t, "/var/run/secrets/kubernetes.io/serviceaccount/token", cfg.AuthInfos[now.AuthInfo].TokenFile)
	own := p.Spec.Volumes[len(p.Spec.Volumes)-1]
	require.Equal(t, addressVolume, own.Name)
	require.Equal(t, MeshBundle, own.Projected.Sources[0].ConfigMap.Name)
	require.Equal(t, "metadata.annotations['ctrlmesh.kusionstack.io/kubeconfig-content']", own.Projected.Sources[1].DownwardAPI.Items[0].FieldRef.FieldPath)
}

// A mount over a file of such a volume would go when the Secret changes, and the
// pod past the mesh. So the kubeconfig becomes part of the volume.
func TestAddressByKubeconfigInASecret(t *testing.T) {
	for volume, want := range map[string][]corev1.VolumeProjection{
		"secret": {{Secret: &corev1.SecretProjection{LocalObjectReference: corev1.LocalObjectReference{Name: "kubeconfig"}}}},
		"items":  nil,
		"map": {{ConfigMap: &corev1.ConfigMapProjection{LocalObjectReference: corev1.LocalObjectReference{Name: "kubeconfig"},
			Items: []corev1.KeyToPath{{Key: "b", Path: "more"}}}}},
	} {
		out, msg := admit(t, addressWebhook(t), func(p *corev1.Pod) {
			for i := range p.Spec.Containers {
				p.Spec.Containers[i].Args = []string{"--kubeconfig=/etc/kube/config"}
				p.Spec.Containers[i].VolumeMounts = append(p.Spec.Containers[0].VolumeMounts[:1:1], corev1.VolumeMount{Name: volume, MountPath: "/etc/kube/"})
			}
		})
		require.Empty(t, msg)
		leads(t, out)
		for _, v := range out.Spec.Volumes {
			if v.Name == volume {
				require.Equal(t, append(want, kubeconfigSource("config")), v.Projected.Sources)
			}
		}
		for _, m := range out.Spec.Containers[0].VolumeMounts {
			require.NotEqual(t, kubeconfigFile, m.SubPath)
		}
	}
	out, _ := admit(t, addressWebhook(t), func(p *corev1.Pod) {
		p.Annotations[v1alpha1.KubeconfigAnnotation] = "/var/run/secrets/kubernetes.io/serviceaccount/kubeconfig"
		p.Spec.Containers = p.Spec.Containers[:1]
	})
	require.Equal(t, kubeconfigSource("kubeconfig"), out.Spec.Volumes[0].Projected.Sources[2])
	require.Equal(t, MeshBundle, out.Spec.Volumes[0].Projected.Sources[1].ConfigMap.Name, "and the bundle is swapped")
	leads(t, out)
}

func TestWithKubeconfig(t *testing.T) {
	mode, yes := int32(0o400), true
	name := corev1.LocalObjectReference{Name: "x"}
	keys := func(paths ...string) (out []corev1.KeyToPath) {
		for _, p := range paths {
			out = append(out, corev1.KeyToPath{Key: "k-" + p, Path: p})
		}
		return out
	}
	fields := func(paths ...string) (out []corev1.DownwardAPIVolumeFile) {
		for _, p := range paths {
			out = append(out, corev1.DownwardAPIVolumeFile{Path: p, FieldRef: &corev1.ObjectFieldSelector{FieldPath: "metadata.name"}})
		}
		return out
	}
	secret := func(paths ...string) corev1.VolumeProjection {
		return corev1.VolumeProjection{Secret: &corev1.SecretProjection{LocalObjectReference: name, Items: keys(paths...), Optional: &yes}}
	}
	configMap := func(paths ...string) corev1.VolumeProjection {
		return corev1.VolumeProjection{ConfigMap: &corev1.ConfigMapProjection{LocalObjectReference: name, Items: keys(paths...), Optional: &yes}}
	}
	downward := func(paths ...string) corev1.VolumeProjection {
		return corev1.VolumeProjection{DownwardAPI: &corev1.DownwardAPIProjection{Items: fields(paths...)}}
	}
	token := corev1.VolumeProjection{ServiceAccountToken: &corev1.ServiceAccountTokenProjection{Path: "token"}}

	// As a volume of its own, by kind.
	volumes := map[string]func(...string) corev1.VolumeSource{
		"secret": func(p ...string) corev1.VolumeSource {
			return corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{SecretName: "x", Items: keys(p...), Optional: &yes, DefaultMode: &mode}}
		},
		"configMap": func(p ...string) corev1.VolumeSource {
			return corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: name, Items: keys(p...), Optional: &yes, DefaultMode: &mode}}
		},
		"downwardAPI": func(p ...string) corev1.VolumeSource {
			return corev1.VolumeSource{DownwardAPI: &corev1.DownwardAPIVolumeSource{Items: fields(p...), DefaultMode: &mode}}
		},
		"projected": func(p ...string) corev1.VolumeSource {
			return corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{
				Sources: []corev1.VolumeProjection{token, secret(p...), configMap(p...), downward(p...)}, DefaultMode: &mode,
			}}
		},
	}
	sources := map[string]func(...string) []corev1.VolumeProjection{
		"secret":      func(p ...string) []corev1.VolumeProjection { return []corev1.VolumeProjection{secret(p...)} },
		"configMap":   func(p ...string) []corev1.VolumeProjection { return []corev1.VolumeProjection{configMap(p...)} },
		"downwardAPI": func(p ...string) []corev1.VolumeProjection { return []corev1.VolumeProjection{downward(p...)} },
		"projected": func(p ...string) []corev1.VolumeProjection {
			return []corev1.VolumeProjection{secret(p...), configMap(p...), downward(p...)}
		},
	}
	for _, c := range []struct {
		what   string
		before []string
		after  []string
		gone   bool // the source would have nothing but the file
	}{
		{"all keys", nil, nil, false},
		{"among items", []string{"a", "dir/config", "b"}, []string{"a", "b"}, false},
		{"written otherwise", []string{"a", "dir//config"}, []string{"a"}, false},
		{"not among items", []string{"a", "config"}, []string{"a", "config"}, false},
		{"the only item", []string{"dir/config"}, nil, true},
	} {
		for kind, volume := range volumes {
			in := corev1.Volume{Name: "v", VolumeSource: volume(c.before...)}
			was := in.DeepCopy()
			var want []corev1.VolumeProjection
			if kind == "projected" {
				want = append(want, token)
			}
			if !c.gone {
				want = append(want, sources[kind](c.after...)...)
			}
			want = append(want, kubeconfigSource("dir/config"))
			require.True(t, keptUpToDate(in))
			out := withKubeconfig(in, "dir/config")
			require.Equal(t, corev1.Volume{Name: "v", VolumeSource: corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{Sources: want, DefaultMode: &mode}}}, out, "%s, %s", kind, c.what)
			require.Equal(t, *was, in, "what came in is compared with what goes out")
			require.Equal(t, out, withKubeconfig(out, "dir/config"), "once more, as the apiserver does")
		}
	}
}

func TestAddressRefusals(t *testing.T) {
	pass := shard("zero", map[string]string{"shard": "0"})
	pass.Spec.ClientCertificates = v1alpha1.ClientCertificatesPassthrough
	notYet := addressWebhook(t)
	notYet.Permits = func(context.Context, netip.Addr) bool { return false }
	for _, c := range []struct {
		w      *Webhook
		says   string
		change func(*corev1.Pod)
	}{
		{addressWebhook(t), "a pod for windows cannot be captured", func(p *corev1.Pod) { p.Spec.OS = &corev1.PodOS{Name: corev1.Windows} }},
		{newWebhook(t), "Service mesh/ctrlmesh-agent has no address", func(*corev1.Pod) {}},
		{newWebhook(t, agentService("")), "has no address", func(*corev1.Pod) {}},
		{notYet, "Secret mesh/ctrlmesh-mesh-ca says which to delete", func(*corev1.Pod) {}},
		{newWebhook(t, agentService("10.96.0.9"), pass), "clientCertificates: Passthrough of ShardingConfig zero", func(*corev1.Pod) {}},
		{addressWebhook(t), `"eppf" is no capture mode: write ebpf, iptables or address`, func(p *corev1.Pod) { p.Annotations[v1alpha1.CaptureAnnotation] = "eppf" }},
		{addressWebhook(t), "only capture by ebpf can distinguish it, not address", func(p *corev1.Pod) { p.Spec.HostNetwork = true }},
		{addressWebhook(t), "relative path (config)", func(p *corev1.Pod) { p.Spec.Containers[0].Args = []string{"--kubeconfig=config"} }},
		{addressWebhook(t), "refers to a variable ($(HOME)/config)", func(p *corev1.Pod) { p.Spec.Containers[0].Args = []string{"--kubeconfig=$(HOME)/config"} }},
		{addressWebhook(t), "KUBECONFIG has no value in the pod", func(p *corev1.Pod) {
			p.Spec.Containers[0].Env = []corev1.EnvVar{{Name: "KUBECONFIG", ValueFrom: &corev1.EnvVarSource{}}}
		}},
		{addressWebhook(t), "set automountServiceAccountToken: true", func(p *corev1.Pod) { p.Spec.Containers[1].Args = []string{"--kubeconfig=/config"} }},
		{addressWebhook(t), "container side", func(p *corev1.Pod) { p.Annotations[v1alpha1.KubeconfigAnnotation] = "/config" }},
		{addressWebhook(t), "mount it at one path", func(p *corev1.Pod) {
			for i := range p.Spec.Containers {
				p.Spec.Containers[i].Args = []string{"--kubeconfig=/config"}
			}
			p.Spec.Containers[1].VolumeMounts = []corev1.VolumeMount{{Name: "token", MountPath: "/elsewhere"}}
		}},
	} {
		out, msg := admit(t, c.w, c.change)
		require.Nil(t, out)
		require.Contains(t, msg, c.says)
	}
}

// A replaced kubeconfig of another cluster or user is reported, and can be kept.
func TestReplacedKubeconfigsAreReported(t *testing.T) {
	p := &corev1.Pod{}
	require.NoError(t, yaml.UnmarshalStrict([]byte(byAddress), p))
	p.Spec.ServiceAccountName = "operator"
	p.Spec.Containers[0].Args = []string{"--kubeconfig=/etc/op/config"}
	p.Spec.Containers[0].Env = []corev1.EnvVar{{Name: "KUBECONFIG", Value: "relative"}}
	handle := func() admission.Response {
		in, err := json.Marshal(p)
		require.NoError(t, err)
		r, _ := create(t, addressWebhook(t), string(in), false)
		return r
	}
	require.Contains(t, handle().Result.Message, "relative path")
	p.Spec.Containers[0].Env = nil
	require.Equal(t, []string{"container main: kubeconfig /etc/op/config is replaced: it leads to this cluster, as ServiceAccount operator (keep it: annotation ctrlmesh.kusionstack.io/kubeconfig: none)"}, handle().Warnings)

	p.Annotations[v1alpha1.KubeconfigAnnotation] = v1alpha1.KubeconfigNone
	p.Spec.Containers[0].Env = []corev1.EnvVar{{Name: "KUBECONFIG", Value: "relative"}}
	r := handle()
	require.True(t, r.Allowed)
	require.Empty(t, r.Warnings)
	out, _ := admit(t, addressWebhook(t), func(in *corev1.Pod) { p.DeepCopyInto(in) })
	require.Len(t, out.Spec.Containers[0].VolumeMounts, 1)
	require.Len(t, out.Spec.Volumes, 5)
	require.Equal(t, "10.96.0.9", out.Spec.Containers[0].Env[0].Value, "who reads none is led by the environment")
}

// Others are left alone, and a forged kubeconfig goes.
func TestNotByAddress(t *testing.T) {
	out, _ := admit(t, newWebhook(t), func(p *corev1.Pod) {
		p.Annotations[v1alpha1.CaptureAnnotation] = v1alpha1.CaptureIPTables
		p.Annotations[v1alpha1.KubeconfigContentAnnotation] = "forged"
		p.Spec.Containers[0].Args = []string{"--kubeconfig=/config"}
	})
	require.Empty(t, out.Spec.Containers[0].Env)
	require.Len(t, out.Spec.Containers[0].VolumeMounts, 1)
	require.NotContains(t, out.Annotations, v1alpha1.KubeconfigContentAnnotation)
}

func TestHostNetwork(t *testing.T) {
	host := func(p *corev1.Pod) {
		p.Spec.HostNetwork = true
		p.Annotations[v1alpha1.CaptureAnnotation] = v1alpha1.CaptureEBPF
	}
	w := newWebhook(t)
	_, msg := admit(t, w, host)
	require.Contains(t, msg, "no agent is connected that could report it")
	require.NoError(t, WriteConfigMap(t.Context(), w.Bundles.Client, "mesh", HostNetworkConfigMap, HostNetwork(false, map[string]string{"n1": "cgroup v1", "n2": "b", "n3": "c", "n4": "d"})))
	_, msg = admit(t, w, host)
	require.Contains(t, msg, "(node n1: cgroup v1; node n2: b; node n3: c; and 1 more nodes): remove hostNetwork from the pod template, or the label")
	require.NoError(t, WriteConfigMap(t.Context(), w.Bundles.Client, "mesh", HostNetworkConfigMap, HostNetwork(true, map[string]string{"n1": "cgroup v1"})))
	out, msg := admit(t, w, host)
	require.Empty(t, msg)
	require.NotNil(t, out)
}
