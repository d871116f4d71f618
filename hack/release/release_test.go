package main

import (
	"archive/tar"
	"bytes"
	"io"
	"log"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/stretchr/testify/require"
)

const committed = 1_700_000_000

// debian builds a package of Debian with the files that are given by their paths.
func debian(t *testing.T, dir, name string, files map[string]string) {
	t.Helper()
	if _, err := exec.LookPath("dpkg-deb"); err != nil {
		t.Skip("needs dpkg-deb")
	}
	root := t.TempDir()
	files["DEBIAN/control"] = "Package: " + name + "\nVersion: 1.0+deb12u1\nArchitecture: all\nMaintainer: nobody\nDescription: a package\n of the test\n"
	for path, body := range files {
		require.NoError(t, os.MkdirAll(filepath.Join(root, filepath.Dir(path)), 0o755))
		require.NoError(t, os.WriteFile(filepath.Join(root, path), []byte(body), 0o644))
	}
	out, err := exec.Command("dpkg-deb", "--root-owner-group", "--build", root, filepath.Join(dir, name+".deb")).CombinedOutput()
	require.NoError(t, err, string(out))
}

// architectures makes the directories of two, in which the test itself stands for the programs.
func architectures(t *testing.T) []string {
	t.Helper()
	itself, err := os.Executable()
	require.NoError(t, err)
	var dirs []string
	for _, architecture := range []string{"amd64", "arm64"} {
		dir := filepath.Join(t.TempDir(), architecture)
		packages := filepath.Join(dir, "packages")
		require.NoError(t, os.MkdirAll(packages, 0o755))
		for _, r := range recipes {
			require.NoError(t, os.Symlink(itself, filepath.Join(dir, r.program)))
		}
		debian(t, packages, "base-files", map[string]string{"usr/lib/os-release": "ID=debian\n"})
		debian(t, packages, "ca-certificates", map[string]string{"usr/share/ca-certificates/mozilla/b.crt": "B\n", "usr/share/ca-certificates/mozilla/a.crt": "A"})
		debian(t, packages, "iptables", map[string]string{
			"usr/sbin/xtables-nft-multi": architecture, "usr/share/man/man8/iptables.8": "manual",
			"usr/share/doc/iptables/copyright": "GPL", "usr/share/doc/iptables/changelog": "changes",
		})
		dirs = append(dirs, dir)
	}
	return dirs
}

func build(t *testing.T, dir string, architectures []string) *release {
	t.Helper()
	r := &release{repository: "registry.example.com/mesh", tag: "1.2.3", dir: dir, created: time.Unix(committed, 0).UTC()}
	require.NoError(t, r.buildImages(architectures))
	return r
}

var shared *release

// made makes the images once for all tests.
func made(t *testing.T) *release {
	t.Helper()
	if shared == nil {
		dir, err := os.MkdirTemp("", "")
		require.NoError(t, err)
		shared = build(t, dir, architectures(t))
	}
	return shared
}

func TestMain(m *testing.M) {
	code := m.Run()
	if shared != nil {
		_ = os.RemoveAll(shared.dir)
	}
	os.Exit(code)
}

// contents returns the files of an image: a link by "-> " and its target, a directory by nothing.
func contents(t *testing.T, image v1.Image) map[string]string {
	t.Helper()
	layers, err := image.Layers()
	require.NoError(t, err)
	all := map[string]string{}
	for _, layer := range layers {
		from, err := layer.Uncompressed()
		require.NoError(t, err)
		for r := tar.NewReader(from); ; {
			h, err := r.Next()
			if err == io.EOF {
				break
			}
			require.NoError(t, err)
			require.Zero(t, h.Uid)
			body, err := io.ReadAll(r)
			require.NoError(t, err)
			if all[h.Name] = string(body); h.Typeflag == tar.TypeSymlink {
				all[h.Name] = "-> " + h.Linkname
			}
		}
	}
	return all
}

func TestAnImageHasPackagesAndTheirRecords(t *testing.T) {
	r := made(t)
	o, err := open(filepath.Join(r.dir, "agent.tar"))
	require.NoError(t, err)
	defer o.Close()
	require.Equal(t, map[string]string{annotationTag: "1.2.3", annotationName: "registry.example.com/mesh/agent:1.2.3"}, o.annotations)
	manifest, err := o.index.IndexManifest()
	require.NoError(t, err)
	require.Len(t, manifest.Manifests, 2)
	for i, architecture := range []string{"amd64", "arm64"} {
		described := manifest.Manifests[i]
		require.Equal(t, &v1.Platform{OS: "linux", Architecture: architecture}, described.Platform)
		image, err := o.index.Image(described.Digest)
		require.NoError(t, err)
		config, err := image.ConfigFile()
		require.NoError(t, err)
		require.Equal(t, architecture, config.Architecture)
		require.Equal(t, []string{"/ctrlmesh-agent"}, config.Config.Entrypoint)
		require.Equal(t, "1.2.3", config.Config.Labels["org.opencontainers.image.version"])
		require.EqualValues(t, committed, config.Created.Unix())

		has := contents(t, image)
		require.Equal(t, architecture, has["usr/sbin/xtables-nft-multi"])
		require.Equal(t, "-> xtables-nft-multi", has["usr/sbin/ip6tables-restore"])
		require.Equal(t, "-> /ctrlmesh-agent", has["usr/sbin/iptables-bounded"])
		require.Equal(t, "A\nB\n", has["etc/ssl/certs/ca-certificates.crt"])
		require.Equal(t, "ID=debian\n", has["usr/lib/os-release"])
		require.Contains(t, has["var/lib/dpkg/status.d/iptables"], "Version: 1.0+deb12u1\n")
		require.Equal(t, "GPL", has["usr/share/doc/iptables/copyright"])
		require.NotContains(t, has, "usr/share/doc/iptables/changelog")
		require.NotContains(t, has, "usr/share/man/man8/iptables.8")
		require.NotEmpty(t, has["ctrlmesh-agent"])
	}
}

func TestTheManagerHasNoPrivilegesAndNoTools(t *testing.T) {
	r := made(t)
	o, err := open(filepath.Join(r.dir, "manager.tar"))
	require.NoError(t, err)
	defer o.Close()
	manifest, err := o.index.IndexManifest()
	require.NoError(t, err)
	image, err := o.index.Image(manifest.Manifests[0].Digest)
	require.NoError(t, err)
	config, err := image.ConfigFile()
	require.NoError(t, err)
	require.Equal(t, "65532", config.Config.User)
	has := contents(t, image)
	require.NotContains(t, has, "usr/sbin/xtables-nft-multi")
	require.Contains(t, has, "usr/lib/os-release", "scanners need it")
}

func TestTheSameInputGivesTheSameFiles(t *testing.T) {
	first, second := made(t), build(t, t.TempDir(), architectures(t))
	names, err := os.ReadDir(first.dir)
	require.NoError(t, err)
	require.Len(t, names, 6, "two images, and a bill of materials for each and each architecture")
	for _, n := range names {
		one, err := os.ReadFile(filepath.Join(first.dir, n.Name()))
		require.NoError(t, err)
		other, err := os.ReadFile(filepath.Join(second.dir, n.Name()))
		require.NoError(t, err)
		require.True(t, bytes.Equal(one, other), n.Name())
	}
	bill, err := os.ReadFile(filepath.Join(first.dir, "agent-arm64.cdx.json"))
	require.NoError(t, err)
	for _, want := range []string{`"pkg:deb/debian/iptables@1.0%2Bdeb12u1?arch=all"`, `"pkg:golang/github.com/google/go-containerregistry@v`, `"pkg:golang/stdlib@1.`} {
		require.Contains(t, string(bill), want)
	}
}

func TestPushKeepsTheDigest(t *testing.T) {
	r := made(t)
	server := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	defer server.Close()
	to := release{repository: strings.TrimPrefix(server.URL, "http://") + "/elsewhere"}
	archive := filepath.Join(r.dir, "agent.tar")
	require.NoError(t, to.push([]string{archive}))
	ref, err := name.ParseReference(to.repository + "/agent:1.2.3")
	require.NoError(t, err)
	pushed, err := remote.Index(ref)
	require.NoError(t, err)
	want, err := digestOf(archive)
	require.NoError(t, err)
	got, err := pushed.Digest()
	require.NoError(t, err)
	require.Equal(t, want, got)
	require.ErrorContains(t, to.push([]string{filepath.Join(r.dir, "agent-amd64.cdx.json")}), "pushing ")
}

func TestChartNamesTheImagesByDigest(t *testing.T) {
	r := made(t)
	dir := t.TempDir()
	values, err := os.ReadFile("../../deploy/chart/values.yaml")
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "values.yaml"), values, 0o644))
	require.NoError(t, r.chart(dir))
	got, err := os.ReadFile(filepath.Join(dir, "values.yaml"))
	require.NoError(t, err)
	want := strings.NewReplacer("registry: localhost/ctrlmesh", "registry: registry.example.com/mesh", "tag: dev", `tag: "1.2.3"`).Replace(string(values))
	for _, image := range []string{"manager", "agent"} {
		digest, err := digestOf(filepath.Join(r.dir, image+".tar"))
		require.NoError(t, err)
		want = strings.Replace(want, `digest: ""`, "digest: "+digest.String(), 1)
	}
	require.Equal(t, want, string(got))
	require.ErrorContains(t, (&release{dir: t.TempDir()}).chart(dir), "reading the image manager")
}

func TestKrewManifest(t *testing.T) {
	dir := t.TempDir()
	var archives []string
	for _, platform := range []string{"linux_arm64", "windows_amd64"} {
		path := filepath.Join(dir, "kubectl-ctrlmesh_"+platform+".tar.gz")
		require.NoError(t, os.WriteFile(path, nil, 0o644))
		archives = append(archives, path)
	}
	var b strings.Builder
	require.NoError(t, (&release{tag: "1.2.3"}).krew(&b, archives))
	require.Contains(t, b.String(), `  - selector:
      matchLabels: {os: windows, arch: amd64}
    uri: https://github.com/ctrlmesh/ctrlmesh/releases/download/v1.2.3/kubectl-ctrlmesh_windows_amd64.tar.gz
    sha256: e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855
    bin: kubectl-ctrlmesh.exe
`)
	require.ErrorContains(t, (&release{}).krew(&b, []string{"x.zip"}), "does not end in")
}
