package inject

import (
	"fmt"
	"net/netip"
	"net/url"
	"path"
	"slices"
	"strings"

	"golang.org/x/net/http/httpproxy"
	"gomodules.xyz/jsonpatch/v2"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/manager/platform"
)

const (
	serviceHost = "KUBERNETES_SERVICE_HOST"
	// accountDir is where clients look for the token and the CA of their service account.
	accountDir = "/var/run/secrets/kubernetes.io/serviceaccount"
)

// sandboxes are parts of the names of runtime classes under which a pod's connections are made by
// another kernel or network stack than the node's.
var sandboxes = []string{"gvisor", "runsc", "kata", "firecracker"}

// proxies are the variables that send a client's HTTPS connections through a proxy, each with the
// one that exempts hosts.
var proxies = map[string]string{"HTTPS_PROXY": "NO_PROXY", "ALL_PROXY": "NO_PROXY", "https_proxy": "no_proxy", "all_proxy": "no_proxy"}

// hazards warns of what makes the clients of a captured pod pass by the mesh, whose CA alone they
// trust, so that they reach no apiserver. service are the apiserver's addresses that clients know
// from their environment, the agents' own under capture by address; hosts are the others by which
// they may reach it.
func hazards(pod *corev1.Pod, capture string, service []netip.AddrPort, hosts []string) []string {
	var found warnings
	warn := found.add
	var lists proxyLists
	secrets := secretsOf(pod)
	byAddress := capture == v1alpha1.CaptureAddress
	if name := strings.ToLower(ptr.Deref(pod.Spec.RuntimeClassName, "")); !byAddress && slices.ContainsFunc(sandboxes, func(s string) bool { return strings.Contains(name, s) }) {
		warn("runtimeClassName %s: the node may not see the connections of a sandboxed pod, and cannot redirect them then: set annotation %s: %s, which needs no redirection", name, v1alpha1.CaptureAnnotation, v1alpha1.CaptureAddress)
	}
	for _, c := range containersOf(pod) {
		if host := valueOf(c, serviceHost); !byAddress && host != "" && !slices.Contains(slices.Concat(hostsOf(service), hosts), strings.ToLower(host)) {
			warn("container %s: %s is %s: connections there are captured only if that is an address of the apiserver's Service or of its endpoints: remove the variable, add its value to %s of the platform settings, or set annotation %s: %s, which replaces it", c.Name, serviceHost, host, platform.APIServerAddresses, v1alpha1.CaptureAnnotation, v1alpha1.CaptureAddress)
		}
		if !byAddress {
			switch name, unread := lists.proxyOf(c, service); {
			case unread:
				warn("container %s: %s is not read, because the lists of hosts without a proxy have more than %d KiB in this pod: connections to the apiserver are captured only if it has %s", c.Name, proxies[name], maxProxyLists>>10, strings.Join(hostsOf(service), " and "))
			case name != "":
				warn("container %s: %s sends its connections to the apiserver through a proxy, where they are not captured: add %s to %s", c.Name, name, strings.Join(hostsOf(service), " and "), proxies[name])
			}
		}
		for _, m := range c.VolumeMounts {
			if secret, ok := secrets[m.Name]; ok && path.Clean(m.MountPath) == accountDir {
				warn("container %s mounts Secret %s as its service account: the CA there is the cluster's, not the mesh's: remove the mount, so that Kubernetes mounts a token by itself", c.Name, secret)
			}
		}
	}
	return found.list()
}

// secretsOf returns the Secrets of a pod's volumes by the names of the volumes.
func secretsOf(pod *corev1.Pod) map[string]string {
	out := map[string]string{}
	for _, v := range pod.Spec.Volumes {
		if v.Secret != nil {
			out[v.Name] = v.Secret.SecretName
		}
	}
	return out
}

// mayPass reports whether the apiserver's addresses matter to hazards.
func mayPass(pod *corev1.Pod) bool {
	for _, c := range containersOf(pod) {
		if slices.ContainsFunc(c.Env, func(e corev1.EnvVar) bool { return e.Name == serviceHost || proxies[e.Name] != "" }) {
			return true
		}
	}
	return false
}

// exempt adds the agents' address to a container's lists of hosts that need no proxy. It returns
// the variables that the container has not.
func exempt(at string, c corev1.Container, agents netip.AddrPort, lists *proxyLists) (ops []jsonpatch.JsonPatchOperation, missing []corev1.EnvVar) {
	if name, _ := lists.proxyOf(c, []netip.AddrPort{agents}); name == "" {
		return nil, nil
	}
	host := agents.Addr().String()
	var done []string
	for _, e := range c.Env {
		list := proxies[e.Name]
		if list == "" || slices.Contains(done, list) {
			continue
		}
		done = append(done, list)
		i := slices.IndexFunc(c.Env, func(e corev1.EnvVar) bool { return e.Name == list })
		switch {
		case i < 0:
			missing = append(missing, corev1.EnvVar{Name: list, Value: host})
		case strings.HasSuffix(c.Env[i].Value, ","+host): // a list that is too long to be read
		case c.Env[i].ValueFrom == nil:
			value := strings.TrimPrefix(c.Env[i].Value+","+host, ",")
			ops = append(ops, jsonpatch.NewOperation("add", fmt.Sprintf("%s/env/%d/value", at, i), value))
		}
	}
	return ops, missing
}

// maxProxyLists bounds the lists of hosts without a proxy that are read of a pod, in bytes. One of
// 1 MiB would take more than a second, and anybody can have a pod examined.
const maxProxyLists = 64 << 10

// proxyLists reads a pod's lists of hosts without a proxy. Its zero value is ready to use.
type proxyLists struct{ read int }

// proxyOf returns the variable that sends connections to a service through a proxy; empty if none
// does, as far as the pod shows it. unread reports that the list of the variable is too long, and
// may exempt the service.
func (l *proxyLists) proxyOf(c corev1.Container, service []netip.AddrPort) (name string, unread bool) {
	exempts := map[string]bool{} // by the variable with the list: a container may repeat others
	for _, e := range c.Env {
		list := proxies[e.Name]
		if list == "" || !isProxy(e) {
			continue
		}
		if _, known := exempts[list]; !known {
			exempts[list], unread = l.exempts(valueOf(c, list), service)
		}
		if !exempts[list] {
			return e.Name, unread
		}
	}
	return "", false
}

// exempts reports whether a list exempts a service from a proxy.
func (l *proxyLists) exempts(list string, service []netip.AddrPort) (exempts, unread bool) {
	if l.read+len(list) > maxProxyLists {
		return false, true
	}
	l.read += len(list)
	config := httpproxy.Config{HTTPSProxy: "http://unknown", NoProxy: list}
	proxy := config.ProxyFunc()
	return !slices.ContainsFunc(service, func(to netip.AddrPort) bool { return passesProxy(proxy, to.String()) }), false
}

// isProxy reports whether the value of a variable is a proxy, or unknown.
func isProxy(e corev1.EnvVar) bool {
	if e.Value == "" {
		return e.ValueFrom != nil
	}
	config := httpproxy.Config{HTTPSProxy: e.Value}
	return passesProxy(config.ProxyFunc(), "192.0.2.1:443") // any address but loopback
}

// passesProxy reports whether connections to an address go through a proxy.
func passesProxy(proxy func(*url.URL) (*url.URL, error), to string) bool {
	through, err := proxy(&url.URL{Scheme: "https", Host: to})
	return err == nil && through != nil
}

// valueOf returns the value of a variable; empty if it has none, or is set from elsewhere.
func valueOf(c corev1.Container, name string) string {
	if e := collect.Find(c.Env, func(e corev1.EnvVar) bool { return e.Name == name }); e != nil {
		return e.Value
	}
	return ""
}

func hostsOf(service []netip.AddrPort) []string {
	return collect.Map(service, func(a netip.AddrPort) string { return a.Addr().String() })
}
