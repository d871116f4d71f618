package inject

import (
	"fmt"
	"reflect"
	"slices"
	"strings"

	"gomodules.xyz/jsonpatch/v2"
	corev1 "k8s.io/api/core/v1"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

const (
	// egressVolume has the egress CA. It is not in addressDir, which is a mount.
	egressVolume = "ctrlmesh-egress-ca"
	egressDir    = "/var/run/secrets/egress." + v1alpha1.GroupName
)

// egressEnvironment makes clients trust the egress CA in addition to their own CAs. Go and
// OpenSSL read directories: the others are the defaults of OpenSSL and the distributions.
// Node.js reads a file.
var egressEnvironment = []corev1.EnvVar{
	{Name: "SSL_CERT_DIR", Value: strings.Join([]string{egressDir, "/etc/ssl/certs", "/etc/pki/tls/certs", "/usr/lib/ssl/certs", "/usr/local/ssl/certs"}, ":")},
	{Name: "NODE_EXTRA_CA_CERTS", Value: egressDir + "/" + bundleKey},
}

// TrustsEgress reports whether a pod opted in to the egress CA.
func TrustsEgress(pod *corev1.Pod) bool {
	return pod.Annotations[v1alpha1.TrustEgressAnnotation] == "true"
}

// trustEgress makes a pod's clients trust the egress CA, and warns about those that it cannot
// configure. byAddress reports whether toAddress has set the environment of all containers.
func trustEgress(pod *corev1.Pod, byAddress bool) ([]jsonpatch.JsonPatchOperation, []string) {
	var ops []jsonpatch.JsonPatchOperation
	var found warnings
	volume := corev1.Volume{Name: egressVolume, VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{
		LocalObjectReference: corev1.LocalObjectReference{Name: EgressBundle},
		DefaultMode:          new(corev1.ConfigMapVolumeSourceDefaultMode),
	}}}
	switch i := slices.IndexFunc(pod.Spec.Volumes, named(egressVolume)); {
	case pod.Spec.Volumes == nil:
		ops = append(ops, jsonpatch.NewOperation("add", "/spec/volumes", []corev1.Volume{volume}))
	case i < 0:
		ops = append(ops, jsonpatch.NewOperation("add", "/spec/volumes/-", volume))
	case !reflect.DeepEqual(pod.Spec.Volumes[i], volume):
		ops = append(ops, jsonpatch.NewOperation("replace", fmt.Sprintf("/spec/volumes/%d", i), volume))
	}
	for at, c := range containersOf(pod) {
		if !slices.ContainsFunc(c.VolumeMounts, func(m corev1.VolumeMount) bool { return m.Name == egressVolume && m.MountPath == egressDir }) {
			mount := corev1.VolumeMount{Name: egressVolume, MountPath: egressDir, ReadOnly: true}
			if c.VolumeMounts == nil {
				ops = append(ops, jsonpatch.NewOperation("add", at+"/volumeMounts", []corev1.VolumeMount{mount}))
			} else {
				ops = append(ops, jsonpatch.NewOperation("add", at+"/volumeMounts/-", mount))
			}
		}
		missing := lacksEnvironment(c, &found)
		if len(missing) > 0 && c.Env == nil && !byAddress {
			ops = append(ops, jsonpatch.NewOperation("add", at+"/env", missing))
			continue
		}
		for _, e := range missing {
			ops = append(ops, jsonpatch.NewOperation("add", at+"/env/-", e))
		}
	}
	return ops, found.list()
}

// lacksEnvironment returns what a container's environment lacks, and warns of what it sets
// itself.
func lacksEnvironment(c corev1.Container, found *warnings) (missing []corev1.EnvVar) {
	for _, e := range egressEnvironment {
		switch j := slices.IndexFunc(c.Env, func(h corev1.EnvVar) bool { return h.Name == e.Name }); {
		case j < 0:
			missing = append(missing, e)
		case c.Env[j] != e:
			found.add("container %s: %s is set, and is left alone: clients that heed it refuse hosts whose requests the mesh must see (add %s to it, or remove annotation %s)", c.Name, e.Name, strings.SplitN(e.Value, ":", 2)[0], v1alpha1.TrustEgressAnnotation)
		}
	}
	return missing
}
