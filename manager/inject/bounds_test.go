package inject

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
)

func TestProxyListsOfAPodAreReadOnceAndInPart(t *testing.T) {
	service := []netip.AddrPort{netip.MustParseAddrPort("10.96.0.1:443")}
	container := func(variables, list int) corev1.Container {
		c := corev1.Container{Name: "c", Env: []corev1.EnvVar{{Name: "NO_PROXY", Value: "10.96.0.1" + strings.Repeat(",a", list/2)}}}
		for range variables {
			c.Env = append(c.Env, corev1.EnvVar{Name: "HTTPS_PROXY", Value: "proxy"})
		}
		return c
	}
	t.Run("once", func(t *testing.T) {
		var lists proxyLists
		c := container(100, 1<<10)
		name, unread := lists.proxyOf(c, service)
		require.Empty(t, name)
		require.False(t, unread)
		require.Equal(t, len(c.Env[0].Value), lists.read)
	})
	t.Run("in part", func(t *testing.T) {
		long, short := container(1, maxProxyLists), container(1, 0)
		pod := &corev1.Pod{Spec: corev1.PodSpec{Containers: []corev1.Container{long, short}}}
		got := hazards(pod, "", service, nil)
		require.Len(t, got, 1)
		require.Contains(t, got[0], "container c: NO_PROXY is not read, because the lists of hosts without a proxy have more than 64 KiB in this pod")
	})
	t.Run("together", func(t *testing.T) {
		pod := &corev1.Pod{}
		for range 100 {
			pod.Spec.Containers = append(pod.Spec.Containers, container(1, 1<<10))
		}
		got := hazards(pod, "", service, nil)
		require.Len(t, got, maxWarnings+1)
		require.Equal(t, "and 21 more", got[maxWarnings])
	})
}

func TestUnreadProxyListExemptsTheAgentsOnce(t *testing.T) {
	list := strings.Repeat("a,", maxProxyLists) + "a"
	out, _ := admit(t, addressWebhook(t), func(p *corev1.Pod) {
		p.Spec.Containers[0].Env = []corev1.EnvVar{{Name: "HTTPS_PROXY", Value: "proxy"}, {Name: "NO_PROXY", Value: list}}
	})
	require.Equal(t, list+",10.96.0.9", valueOf(out.Spec.Containers[0], "NO_PROXY"))
}

func TestKubeconfigsOfAPodAreFew(t *testing.T) {
	list := func(n int) string {
		var value strings.Builder
		for i := range n {
			fmt.Fprintf(&value, "/%d:", i)
		}
		return value.String()
	}
	_, err := kubeconfigs(corev1.Container{Env: []corev1.EnvVar{{Name: "KUBECONFIG", Value: list(maxKubeconfigs)}}}, "")
	require.NoError(t, err)
	_, err = kubeconfigs(corev1.Container{Env: []corev1.EnvVar{{Name: "KUBECONFIG", Value: list(48_000)}}}, "")
	require.EqualError(t, err, "it reads more than 32 kubeconfigs: use fewer")
	_, err = kubeconfigs(corev1.Container{Env: []corev1.EnvVar{{Name: "KUBECONFIG", Value: strings.Repeat("a:", 48_000)}}}, "")
	require.ErrorContains(t, err, "KUBECONFIG is a relative path (a)")

	t.Run("of all containers", func(t *testing.T) {
		_, r := admit(t, addressWebhook(t), func(p *corev1.Pod) {
			for i := range maxKubeconfigs + 1 {
				c := *p.Spec.Containers[0].DeepCopy()
				c.Name = fmt.Sprint("c", i)
				c.Env = []corev1.EnvVar{{Name: "KUBECONFIG", Value: "/a"}}
				p.Spec.Containers = append(p.Spec.Containers, c)
			}
		})
		require.Contains(t, r, "its containers read more than 32 kubeconfigs: use fewer")
	})
}

func TestWarningsAreFewAndShort(t *testing.T) {
	var w warnings
	for range 100 {
		w.add("container %s", strings.Repeat("ä", 1<<20))
	}
	got := w.list()
	require.Len(t, got, maxWarnings+1)
	require.Equal(t, "and 84 more", got[maxWarnings])
	require.Less(t, len(strings.Join(got, "")), 2*maxWarnings*maxQuoted)
}
