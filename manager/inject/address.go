package inject

import (
	"fmt"
	"iter"
	"net/netip"
	"path"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"gomodules.xyz/jsonpatch/v2"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/failure"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
)

const (
	// addressVolume contains the mesh's bundle and a kubeconfig for the node's agent. It is
	// mounted at addressDir.
	addressVolume  = "ctrlmesh-kubeconfig"
	addressDir     = "/var/run/secrets/" + v1alpha1.GroupName
	kubeconfigFile = "kubeconfig"
)

// toAddress makes a pod's clients connect to the agents' address: by environment variables and,
// in containers that name a kubeconfig, by another kubeconfig in its place. It does not change
// arguments and commands. It returns the kubeconfig, empty if there is none, and warns about
// each file that it replaces, because the cluster and user of that file are unknown here.
// before are the pod's current volumes.
func toAddress(pod *corev1.Pod, before []corev1.Volume, namespace, bundle string, agents netip.AddrPort) (ops []jsonpatch.JsonPatchOperation, content string, warned []string, err error) {
	env := environment(agents)
	var found warnings
	var lists proxyLists
	tokens, count := tokenPaths(before), 0
	account := compile.AccountOf(pod)
	volumes := slices.Clone(before)
	token := ""
	for at, c := range containersOf(pod) {
		exempted, more := exempt(at, c, agents, &lists)
		ops = append(append(ops, exempted...), setEnv(at+"/env", c.Env, slices.Concat(env, more))...)
		files, err := kubeconfigs(c, pod.Annotations[v1alpha1.KubeconfigAnnotation])
		if err != nil {
			return nil, "", nil, fmt.Errorf("container %s: %w", c.Name, err)
		}
		if len(files) == 0 {
			continue
		}
		if count += len(files); count > maxKubeconfigs {
			return nil, "", nil, fmt.Errorf("its containers read more than %d kubeconfigs: use fewer", maxKubeconfigs)
		}
		switch mine := tokenFile(tokens, c); {
		case mine == "":
			return nil, "", nil, fmt.Errorf("container %s reads the kubeconfig %s, and in its place would authenticate by the pod's service-account token, which the container does not have: set automountServiceAccountToken: true", c.Name, files[0])
		case token != "" && token != mine:
			return nil, "", nil, fmt.Errorf("container %s has its service-account token in %s and another container in %s: the kubeconfig they are given can name one: mount it at one path", c.Name, mine, token)
		default:
			token = mine
		}
		for _, file := range files {
			found.add("container %s: kubeconfig %s is replaced: it leads to this cluster, as ServiceAccount %s (keep it: annotation %s: %s)", c.Name, file, account, v1alpha1.KubeconfigAnnotation, v1alpha1.KubeconfigNone)
		}
		ops = append(ops, mountFiles(at+"/volumeMounts", c.VolumeMounts, volumes, files)...)
	}
	if token == "" {
		return ops, "", nil, nil
	}
	if content, err = kubeconfig(agents, namespace, token); err != nil {
		return nil, "", nil, err
	}
	own := corev1.Volume{Name: addressVolume, VolumeSource: corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{
		DefaultMode: new(corev1.ProjectedVolumeSourceDefaultMode),
		Sources: []corev1.VolumeProjection{
			{ConfigMap: &corev1.ConfigMapProjection{LocalObjectReference: corev1.LocalObjectReference{Name: bundle}}},
			kubeconfigSource(kubeconfigFile),
		},
	}}}
	if i := slices.IndexFunc(volumes, named(addressVolume)); i >= 0 {
		volumes[i] = own
	} else {
		volumes = append(volumes, own)
	}
	for i, v := range volumes {
		switch {
		case i >= len(before):
			ops = append(ops, jsonpatch.NewOperation("add", "/spec/volumes/-", v))
		case !reflect.DeepEqual(v, before[i]):
			ops = append(ops, jsonpatch.NewOperation("replace", fmt.Sprintf("/spec/volumes/%d", i), v))
		}
	}
	return ops, content, found.list(), nil
}

// containersOf yields the containers of a pod with their paths in its JSON.
func containersOf(pod *corev1.Pod) iter.Seq2[string, corev1.Container] {
	return func(yield func(string, corev1.Container) bool) {
		first := len(pod.Spec.InitContainers)
		for i, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
			at := fmt.Sprintf("/spec/initContainers/%d", i)
			if i >= first {
				at = fmt.Sprintf("/spec/containers/%d", i-first)
			}
			if !yield(at, c) {
				return
			}
		}
	}
}

// environment returns what the kubelet would set for a Service at another address.
func environment(agents netip.AddrPort) []corev1.EnvVar {
	host, port, url := agents.Addr().String(), strconv.Itoa(int(agents.Port())), "tcp://"+agents.String()
	return []corev1.EnvVar{
		{Name: "KUBERNETES_SERVICE_HOST", Value: host},
		{Name: "KUBERNETES_SERVICE_PORT", Value: port},
		{Name: "KUBERNETES_SERVICE_PORT_HTTPS", Value: port},
		{Name: "KUBERNETES_PORT", Value: url},
		// Clients look these up by the apiserver's own port, which is always 443.
		{Name: "KUBERNETES_PORT_443_TCP", Value: url},
		{Name: "KUBERNETES_PORT_443_TCP_PROTO", Value: "tcp"},
		{Name: "KUBERNETES_PORT_443_TCP_ADDR", Value: host},
		{Name: "KUBERNETES_PORT_443_TCP_PORT", Value: port},
	}
}

// setEnv inserts variables at the beginning, where others can refer to them, and removes
// others of the same names.
func setEnv(at string, have, want []corev1.EnvVar) (ops []jsonpatch.JsonPatchOperation) {
	wanted := func(e corev1.EnvVar) bool {
		return slices.ContainsFunc(want, func(w corev1.EnvVar) bool { return w.Name == e.Name })
	}
	n := len(want)
	if len(have) >= n && reflect.DeepEqual(have[:n], want) && !slices.ContainsFunc(have[n:], wanted) {
		return nil
	}
	if have == nil {
		return []jsonpatch.JsonPatchOperation{jsonpatch.NewOperation("add", at, want)}
	}
	for i, e := range slices.Backward(have) {
		if wanted(e) {
			ops = append(ops, jsonpatch.NewOperation("remove", fmt.Sprintf("%s/%d", at, i), nil))
		}
	}
	for _, e := range slices.Backward(want) {
		ops = append(ops, jsonpatch.NewOperation("add", at+"/0", e))
	}
	return ops
}

// maxKubeconfigs is how many files of a pod's containers are replaced. Each may copy a volume.
const maxKubeconfigs = 32

// kubeconfigs returns the files that a container's clients read: those that KUBECONFIG or a flag
// --kubeconfig names, and the annotated one.
func kubeconfigs(c corev1.Container, annotated string) ([]string, error) {
	if annotated == v1alpha1.KubeconfigNone {
		return nil, nil
	}
	var files kubeconfigFiles
	if err := files.add("annotation "+v1alpha1.KubeconfigAnnotation, annotated); err != nil {
		return nil, err
	}
	for _, e := range c.Env {
		if e.Name != clientcmd.RecommendedConfigPathEnvVar {
			continue
		}
		if e.ValueFrom != nil {
			return nil, fmt.Errorf("%s has no value in the pod, so that the file is unknown: %s", e.Name, instead)
		}
		for file := range strings.SplitSeq(e.Value, ":") {
			if err := files.add(e.Name, file); err != nil {
				return nil, err
			}
		}
	}
	if err := files.addFlags(slices.Concat(c.Command, c.Args)); err != nil {
		return nil, err
	}
	return files, nil
}

// kubeconfigFiles are the files of a container, each once.
type kubeconfigFiles []string

const instead = "remove it, or write an absolute path"

func (f *kubeconfigFiles) add(what, file string) error {
	switch {
	case file == "":
		return nil // clients read none
	case strings.Contains(file, "$("):
		return fmt.Errorf("%s refers to a variable (%s), so that the file is unknown: %s", what, file, instead)
	case !path.IsAbs(file):
		return fmt.Errorf("%s is a relative path (%s), so that the file is unknown: %s", what, file, instead)
	}
	if file = path.Clean(file); slices.Contains(*f, file) {
		return nil
	}
	if *f = append(*f, file); len(*f) > maxKubeconfigs {
		return fmt.Errorf("it reads more than %d kubeconfigs: use fewer", maxKubeconfigs)
	}
	return nil
}

// addFlags adds the files that flags among the words of a command name.
func (f *kubeconfigFiles) addFlags(words []string) error {
	for i, w := range words {
		flag, ok := strings.CutPrefix(w, "-")
		if !ok {
			continue
		}
		name, value, given := strings.Cut(strings.TrimPrefix(flag, "-"), "=")
		if name != clientcmd.RecommendedConfigPathFlag {
			continue
		}
		if !given && i+1 < len(words) {
			value = words[i+1]
		}
		if err := f.add("--"+name, value); err != nil {
			return err
		}
	}
	return nil
}

// tokenPaths returns the paths of the pod's service-account token within its volumes, by the names
// of those that have it.
func tokenPaths(volumes []corev1.Volume) map[string]string {
	out := map[string]string{}
	for _, v := range volumes {
		if v.Projected == nil {
			continue
		}
		i := slices.IndexFunc(v.Projected.Sources, func(s corev1.VolumeProjection) bool {
			return s.ServiceAccountToken != nil && s.ServiceAccountToken.Audience == ""
		})
		if i >= 0 {
			out[v.Name] = v.Projected.Sources[i].ServiceAccountToken.Path
		}
	}
	return out
}

// tokenFile returns the path of the pod's service-account token in a container; empty without one.
// tokens are the results of tokenPaths.
func tokenFile(tokens map[string]string, c corev1.Container) string {
	for _, m := range c.VolumeMounts {
		if token, ok := tokens[m.Name]; ok && m.SubPath == "" && m.SubPathExpr == "" {
			return path.Join(m.MountPath, token)
		}
	}
	return ""
}

// mountFiles replaces files by the mesh's kubeconfig. In a volume that the kubelet keeps up to
// date, the kubeconfig becomes part of that volume: the volume's next update would remove a
// mount over the file.
func mountFiles(at string, have []corev1.VolumeMount, volumes []corev1.Volume, files []string) (ops []jsonpatch.JsonPatchOperation) {
	own := func(m corev1.VolumeMount) bool { return m.Name == addressVolume && m.MountPath == addressDir }
	if !slices.ContainsFunc(have, own) {
		ops = append(ops, jsonpatch.NewOperation("add", at+"/-", corev1.VolumeMount{Name: addressVolume, MountPath: addressDir, ReadOnly: true}))
	}
	for _, file := range files {
		on := mountOf(have, file)
		mount := corev1.VolumeMount{Name: addressVolume, MountPath: file, SubPath: kubeconfigFile, ReadOnly: true}
		if on < 0 {
			ops = append(ops, jsonpatch.NewOperation("add", at+"/-", mount))
			continue
		}
		m := have[on]
		dir := path.Clean(m.MountPath)
		v := slices.IndexFunc(volumes, named(m.Name))
		switch {
		case m.Name == addressVolume:
		case file == dir:
			ops = append(ops, jsonpatch.NewOperation("replace", fmt.Sprintf("%s/%d", at, on), mount))
		case v >= 0 && m.SubPath == "" && m.SubPathExpr == "" && keptUpToDate(volumes[v]):
			volumes[v] = withKubeconfig(volumes[v], strings.TrimPrefix(file, strings.TrimSuffix(dir, "/")+"/"))
		default:
			ops = append(ops, jsonpatch.NewOperation("add", at+"/-", mount))
		}
	}
	return ops
}

// mountOf returns the index of the mount that contains a file, or is it; -1 if there is none.
func mountOf(have []corev1.VolumeMount, file string) int {
	on := -1
	for i, m := range have {
		dir := path.Clean(m.MountPath)
		if (file == dir || strings.HasPrefix(file, strings.TrimSuffix(dir, "/")+"/")) && (on < 0 || len(dir) > len(path.Clean(have[on].MountPath))) {
			on = i
		}
	}
	return on
}

func keptUpToDate(v corev1.Volume) bool {
	return v.Secret != nil || v.ConfigMap != nil || v.DownwardAPI != nil || v.Projected != nil
}

// withKubeconfig returns a volume with one of its files replaced. If several projected sources
// have a file at one path, the last one counts.
func withKubeconfig(v corev1.Volume, file string) corev1.Volume {
	p := &corev1.ProjectedVolumeSource{}
	switch {
	case v.Secret != nil:
		p.DefaultMode = v.Secret.DefaultMode
		p.Sources = []corev1.VolumeProjection{{Secret: &corev1.SecretProjection{
			LocalObjectReference: corev1.LocalObjectReference{Name: v.Secret.SecretName}, Items: v.Secret.Items, Optional: v.Secret.Optional,
		}}}
	case v.ConfigMap != nil:
		p.DefaultMode = v.ConfigMap.DefaultMode
		p.Sources = []corev1.VolumeProjection{{ConfigMap: &corev1.ConfigMapProjection{
			LocalObjectReference: v.ConfigMap.LocalObjectReference, Items: v.ConfigMap.Items, Optional: v.ConfigMap.Optional,
		}}}
	case v.DownwardAPI != nil:
		p.DefaultMode = v.DownwardAPI.DefaultMode
		p.Sources = []corev1.VolumeProjection{{DownwardAPI: &corev1.DownwardAPIProjection{Items: v.DownwardAPI.Items}}}
	default:
		p = v.Projected.DeepCopy()
	}
	// The apiserver rejects paths that several items name.
	sources := slices.Clone(p.Sources)
	p.Sources = nil
	for _, s := range sources {
		kept := true
		switch {
		case s.Secret != nil:
			s.Secret.Items, kept = elsewhere(s.Secret.Items, file, func(k corev1.KeyToPath) string { return k.Path })
		case s.ConfigMap != nil:
			s.ConfigMap.Items, kept = elsewhere(s.ConfigMap.Items, file, func(k corev1.KeyToPath) string { return k.Path })
		case s.DownwardAPI != nil:
			s.DownwardAPI.Items, kept = elsewhere(s.DownwardAPI.Items, file, func(f corev1.DownwardAPIVolumeFile) string { return f.Path })
		}
		if !kept {
			continue // without items a source would have all its keys
		}
		p.Sources = append(p.Sources, s)
	}
	p.Sources = append(p.Sources, kubeconfigSource(file))
	return corev1.Volume{Name: v.Name, VolumeSource: corev1.VolumeSource{Projected: p}}
}

// elsewhere returns the items that are not at a path, and reports whether any is left if
// there were some.
func elsewhere[T any](items []T, file string, at func(T) string) (left []T, kept bool) {
	left = slices.DeleteFunc(slices.Clone(items), func(i T) bool { return path.Clean(at(i)) == file })
	return left, len(items) == 0 || len(left) > 0
}

func kubeconfigSource(file string) corev1.VolumeProjection {
	return corev1.VolumeProjection{DownwardAPI: &corev1.DownwardAPIProjection{Items: []corev1.DownwardAPIVolumeFile{{
		Path:     file,
		FieldRef: &corev1.ObjectFieldSelector{APIVersion: "v1", FieldPath: "metadata.annotations['" + v1alpha1.KubeconfigContentAnnotation + "']"},
	}}}}
}

// kubeconfig returns a kubeconfig for the agents. The CA is a file, so that it follows a rotation.
func kubeconfig(agents netip.AddrPort, namespace, token string) (string, error) {
	const name = "ctrlmesh"
	c := clientcmdapi.NewConfig()
	c.Clusters[name] = &clientcmdapi.Cluster{Server: "https://" + agents.String(), CertificateAuthority: path.Join(addressDir, bundleKey)}
	c.AuthInfos[name] = &clientcmdapi.AuthInfo{TokenFile: token}
	c.Contexts[name] = &clientcmdapi.Context{Cluster: name, AuthInfo: name, Namespace: namespace}
	c.CurrentContext = name
	content, err := clientcmd.Write(*c)
	return string(content), failure.Wrap(err, "writing a kubeconfig")
}

func named(name string) func(corev1.Volume) bool {
	return func(v corev1.Volume) bool { return v.Name == name }
}
