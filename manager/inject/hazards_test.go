package inject

import (
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

// What passes by the mesh, or makes clients distrust it, is named at admission. Capture by address
// replaces the variables.
func TestHazardsAreNamed(t *testing.T) {
	service := []netip.AddrPort{netip.MustParseAddrPort("10.96.0.1:443"), netip.MustParseAddrPort("[fd00::1]:443")}
	variables := func(pairs ...string) func(*corev1.Pod) {
		return func(p *corev1.Pod) {
			for i := 0; i < len(pairs); i += 2 {
				p.Spec.Containers[0].Env = append(p.Spec.Containers[0].Env, corev1.EnvVar{Name: pairs[i], Value: pairs[i+1]})
			}
		}
	}
	const proxy = "http://proxy.corp:3128"
	for name, c := range map[string]struct {
		change    func(*corev1.Pod)
		want      string // empty: no warning
		byAddress string
	}{
		"nothing":                {func(*corev1.Pod) {}, "", ""},
		"the Service's address":  {variables(serviceHost, "10.96.0.1"), "", ""},
		"another address":        {variables(serviceHost, "api.example.com"), "container main: KUBERNETES_SERVICE_HOST is api.example.com", ""},
		"an additional one":      {variables(serviceHost, "API.example.net"), "", ""},
		"a proxy":                {variables("HTTPS_PROXY", proxy, "NO_PROXY", "localhost"), "add 10.96.0.1 and fd00::1 to NO_PROXY", ""},
		"a proxy in lower case":  {variables("https_proxy", proxy), "add 10.96.0.1 and fd00::1 to no_proxy", ""},
		"a proxy for all":        {variables("ALL_PROXY", proxy, "NO_PROXY", "10.96.0.1"), "ALL_PROXY", ""},
		"a proxy, exempt":        {variables("HTTPS_PROXY", proxy, "NO_PROXY", "10.96.0.0/12,fd00::1"), "", ""},
		"a proxy for HTTP alone": {variables("HTTP_PROXY", proxy), "", ""},
		"an unknown proxy": {func(p *corev1.Pod) {
			p.Spec.Containers[0].Env = []corev1.EnvVar{{Name: "HTTPS_PROXY", ValueFrom: &corev1.EnvVarSource{SecretKeyRef: &corev1.SecretKeySelector{Key: "proxy"}}}}
		}, "HTTPS_PROXY", ""},
		"a sandbox":             {func(p *corev1.Pod) { p.Spec.RuntimeClassName = new("kata-qemu") }, "runtimeClassName kata-qemu", ""},
		"another runtime class": {func(p *corev1.Pod) { p.Spec.RuntimeClassName = new("nvidia") }, "", ""},
		"a token of a Secret": {func(p *corev1.Pod) {
			p.Spec.Volumes = append(p.Spec.Volumes, corev1.Volume{Name: "legacy", VolumeSource: corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{SecretName: "op-token"}}})
			p.Spec.InitContainers[0].VolumeMounts = []corev1.VolumeMount{{Name: "legacy", MountPath: accountDir + "/"}}
		}, "container first mounts Secret op-token", "container first mounts Secret op-token"},
	} {
		p := &corev1.Pod{Spec: corev1.PodSpec{InitContainers: []corev1.Container{{Name: "first"}}, Containers: []corev1.Container{{Name: "main"}}}}
		c.change(p)
		for capture, want := range map[string]string{"": c.want, v1alpha1.CaptureIPTables: c.want, v1alpha1.CaptureAddress: c.byAddress} {
			got := hazards(p, capture, service, []string{"api.example.net"})
			if want == "" {
				require.Empty(t, got, "%s %s", name, capture)
				continue
			}
			require.Len(t, got, 1, "%s %s", name, capture)
			require.Contains(t, got[0], want, "%s %s", name, capture)
		}
	}
}

func TestHazardsAreWarnings(t *testing.T) {
	pod := `{"metadata": {"labels": {"ctrlmesh.kusionstack.io/enable-proxy": "true"}}, "spec": {"containers": [{"name": "main", "env": [{"name": "KUBERNETES_SERVICE_HOST", "value": "10.96.0.2"}]}]}}`
	service := &corev1.Service{}
	service.Namespace, service.Name = "default", "kubernetes"
	service.Spec = corev1.ServiceSpec{ClusterIPs: []string{"10.96.0.1"}, Ports: []corev1.ServicePort{{Name: "https", Port: 443}}}
	r, _ := create(t, newWebhook(t, service), pod, false)
	require.True(t, r.Allowed)
	require.Len(t, r.Warnings, 1)
	service.Spec.ClusterIPs = []string{"10.96.0.2"}
	r, _ = create(t, newWebhook(t, service), pod, false)
	require.Empty(t, r.Warnings)
}

// The agents' address needs no proxy, as little as the apiserver's did.
func TestAddressNeedsNoProxy(t *testing.T) {
	for _, c := range []struct {
		env  []corev1.EnvVar
		want map[string]string
	}{
		{[]corev1.EnvVar{{Name: "HTTPS_PROXY", Value: "http://proxy:3128"}, {Name: "NO_PROXY", Value: "localhost,10.96.0.1"}}, map[string]string{"NO_PROXY": "localhost,10.96.0.1,10.96.0.9"}},
		{[]corev1.EnvVar{{Name: "NO_PROXY"}, {Name: "HTTPS_PROXY", Value: "http://proxy:3128"}, {Name: "ALL_PROXY", Value: "http://proxy:3128"}}, map[string]string{"NO_PROXY": "10.96.0.9"}},
		{[]corev1.EnvVar{{Name: "https_proxy", Value: "http://proxy:3128"}}, map[string]string{"no_proxy": "10.96.0.9"}},
		{[]corev1.EnvVar{{Name: "HTTPS_PROXY", Value: "http://proxy:3128"}, {Name: "NO_PROXY", Value: "10.96.0.0/16"}}, map[string]string{"NO_PROXY": "10.96.0.0/16"}},
		{[]corev1.EnvVar{{Name: "NO_PROXY", Value: "localhost"}}, map[string]string{"NO_PROXY": "localhost"}},
	} {
		out, _ := admit(t, addressWebhook(t), func(p *corev1.Pod) { p.Spec.Containers[0].Env = c.env })
		for name, value := range c.want {
			require.Equal(t, value, valueOf(out.Spec.Containers[0], name), "%+v", c.env)
		}
		proxy, _ := new(proxyLists).proxyOf(out.Spec.Containers[0], []netip.AddrPort{netip.MustParseAddrPort("10.96.0.9:6443")})
		require.Empty(t, proxy)
	}
}

// Clients may have the CA from a ClusterTrustBundle, or from a variable.
func TestEveryWayToTheClusterCALeadsToTheMesh(t *testing.T) {
	ref := corev1.LocalObjectReference{Name: clusterBundle}
	for _, capture := range []string{"", v1alpha1.CaptureAddress} {
		out, _ := admit(t, addressWebhook(t), func(p *corev1.Pod) {
			if capture == "" {
				delete(p.Annotations, v1alpha1.CaptureAnnotation)
			}
			p.Spec.Volumes[0].Projected.Sources[1] = corev1.VolumeProjection{ClusterTrustBundle: &corev1.ClusterTrustBundleProjection{SignerName: new(apiserverSigner), Path: "trusted.crt"}}
			p.Spec.Containers[0].Env = []corev1.EnvVar{
				{Name: "BEFORE", Value: "x"},
				{Name: "CA", ValueFrom: &corev1.EnvVarSource{ConfigMapKeyRef: &corev1.ConfigMapKeySelector{LocalObjectReference: ref, Key: "ca.crt"}}},
			}
			p.Spec.InitContainers[0].EnvFrom = []corev1.EnvFromSource{{ConfigMapRef: &corev1.ConfigMapEnvSource{LocalObjectReference: ref}}}
		})
		require.Equal(t, &corev1.ConfigMapProjection{LocalObjectReference: corev1.LocalObjectReference{Name: MeshBundle}, Items: []corev1.KeyToPath{{Key: "ca.crt", Path: "trusted.crt"}}},
			out.Spec.Volumes[0].Projected.Sources[1].ConfigMap)
		for _, e := range out.Spec.Containers[0].Env {
			if e.Name == "CA" {
				require.Equal(t, MeshBundle, e.ValueFrom.ConfigMapKeyRef.Name)
			}
		}
		require.Equal(t, MeshBundle, out.Spec.InitContainers[0].EnvFrom[0].ConfigMapRef.Name)
	}
}
