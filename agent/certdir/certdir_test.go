package certdir

import (
	"bufio"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"math/big"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/ctrlmesh/ctrlmesh/internal/needs"
)

const rootEnv = "CERTDIR_TEST_ROOT"

// TestMain runs the tests, or the process in a pod: it changes its root directory and waits.
func TestMain(m *testing.M) {
	root := os.Getenv(rootEnv)
	if root == "" {
		os.Exit(m.Run())
	}
	if err := syscall.Chroot(root); err != nil {
		panic(err)
	}
	fmt.Println("ready")
	_, _ = os.Stdin.Read(make([]byte, 1))
}

// startPod starts a process with its own root directory.
func startPod(t *testing.T) (pid int, root string, stop func()) {
	t.Helper()
	needs.Root(t, "changes the root directory of a process")
	root = t.TempDir()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), rootEnv+"="+root)
	cmd.Stderr = t.Output()
	stdin, err := cmd.StdinPipe()
	require.NoError(t, err)
	stdout, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	stopped := false
	stop = func() {
		if !stopped {
			stopped = true
			stdin.Close()
			require.NoError(t, cmd.Wait())
		}
	}
	t.Cleanup(stop)
	_, err = bufio.NewReader(stdout).ReadString('\n')
	require.NoError(t, err)
	return cmd.Process.Pid, root, stop
}

// writePair writes a certificate with this serial number, and its key.
func writePair(t *testing.T, dir string, serial int64) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	template := &x509.Certificate{SerialNumber: big.NewInt(serial), NotAfter: time.Now().Add(time.Hour)}
	cert, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	require.NoError(t, err)
	private, err := x509.MarshalPKCS8PrivateKey(key)
	require.NoError(t, err)
	require.NoError(t, os.MkdirAll(dir, 0o700))
	for name, block := range map[string]*pem.Block{
		certFile: {Type: "CERTIFICATE", Bytes: cert}, keyFile: {Type: "PRIVATE KEY", Bytes: private},
	} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), pem.EncodeToMemory(block), 0o600))
	}
}

// newSource returns a source in a pod to which all processes belong.
func newSource(path string) *Source {
	return &Source{Path: path, Owns: func(int) (bool, error) { return true, nil }}
}

func open(t *testing.T, pid int) *Dir {
	t.Helper()
	d, err := newSource("/certs").Open(pid)
	require.NoError(t, err)
	t.Cleanup(func() { d.Close() })
	return d
}

func requireSerial(t *testing.T, d *Dir, serial int64) {
	t.Helper()
	pair, err := d.GetCertificate(nil)
	require.NoError(t, err)
	require.Equal(t, serial, pair.Leaf.SerialNumber.Int64())
}

func requireLoad(t *testing.T, d *Dir, changed bool) {
	t.Helper()
	got, err := d.Load()
	require.NoError(t, err)
	require.Equal(t, changed, got)
}

// The kubelet writes a directory for each generation, and replaces the link ..data.
func TestRotationByTheKubeletIsNoticed(t *testing.T) {
	pid, root, _ := startPod(t)
	certs := filepath.Join(root, "certs")
	require.NoError(t, os.Mkdir(certs, 0o755))
	for _, name := range []string{certFile, keyFile} {
		require.NoError(t, os.Symlink(filepath.Join("..data", name), filepath.Join(certs, name)))
	}
	rotate := func(generation string, serial int64) {
		writePair(t, filepath.Join(certs, generation), serial)
		next := filepath.Join(certs, "..data_tmp")
		require.NoError(t, os.Symlink(generation, next))
		require.NoError(t, os.Rename(next, filepath.Join(certs, "..data")))
	}
	d := open(t, pid)
	_, err := d.Load()
	require.ErrorIs(t, err, os.ErrNotExist)
	_, err = d.GetCertificate(nil)
	require.ErrorIs(t, err, ErrNone)

	rotate("..one", 1)
	requireLoad(t, d, true)
	requireSerial(t, d, 1)
	requireLoad(t, d, false)
	rotate("..two", 2)
	requireLoad(t, d, true)
	requireSerial(t, d, 2)
}

func TestLinksAreResolvedWithinThePod(t *testing.T) {
	secret := t.TempDir()
	writePair(t, secret, 666) // a file of the node
	for name, target := range map[string]string{
		"absolute": secret,
		"upwards":  "../../../../../../../../../../../.." + secret,
		"process":  "/proc/self/root" + secret,
	} {
		t.Run(name, func(t *testing.T) {
			pid, root, _ := startPod(t)
			require.NoError(t, os.Symlink(target, filepath.Join(root, "certs")))
			d := open(t, pid)
			_, err := d.Load()
			require.ErrorIs(t, err, os.ErrNotExist)

			if name != "process" {
				writePair(t, filepath.Join(root, secret), 1)
				requireLoad(t, d, true)
				requireSerial(t, d, 1)
			}
		})
	}
	t.Run("magic link", func(t *testing.T) {
		pid, root, _ := startPod(t)
		require.NoError(t, os.Mkdir(filepath.Join(root, "proc"), 0o755))
		require.NoError(t, unix.Mount("proc", filepath.Join(root, "proc"), "proc", 0, ""))
		t.Cleanup(func() { require.NoError(t, unix.Unmount(filepath.Join(root, "proc"), 0)) })
		require.NoError(t, os.Symlink(fmt.Sprintf("/proc/%d/root%s", os.Getpid(), secret), filepath.Join(root, "certs")))
		_, err := open(t, pid).Load()
		require.Error(t, err)
		require.True(t, os.IsNotExist(err) == false, "the link is refused, not unknown: %v", err)
	})
}

func TestInvalidFilesKeepTheLastCertificate(t *testing.T) {
	pid, root, _ := startPod(t)
	certs := filepath.Join(root, "certs")
	writePair(t, certs, 1)
	d := open(t, pid)
	requireLoad(t, d, true)
	key, err := os.ReadFile(filepath.Join(certs, keyFile))
	require.NoError(t, err)

	for name, spoil := range map[string]func(file string) error{
		"removed":            os.Remove,
		"another generation": func(file string) error { return os.WriteFile(file, key, 0o600) },
		"garbage":            func(file string) error { return os.WriteFile(file, []byte("x"), 0o600) },
		"too large":          func(file string) error { return os.Truncate(file, maxKey+1) },
		"a directory":        func(file string) error { return replace(file, func() error { return os.Mkdir(file, 0o755) }) },
		"a pipe":             func(file string) error { return replace(file, func() error { return unix.Mkfifo(file, 0o600) }) },
	} {
		t.Run(name, func(t *testing.T) {
			require.NoError(t, os.RemoveAll(certs))
			writePair(t, certs, 2)
			require.NoError(t, spoil(filepath.Join(certs, keyFile)))
			_, err := d.Load()
			require.Error(t, err)
			requireSerial(t, d, 1)
		})
	}
	require.NoError(t, os.RemoveAll(certs))
	writePair(t, certs, 3)
	requireLoad(t, d, true)
	requireSerial(t, d, 3)
}

func replace(file string, by func() error) error {
	if err := os.Remove(file); err != nil {
		return err
	}
	return by()
}

func TestExitOfTheProcessIsReported(t *testing.T) {
	pid, root, stop := startPod(t)
	writePair(t, filepath.Join(root, "certs"), 1)
	d := open(t, pid)
	requireLoad(t, d, true)
	require.NoError(t, syscall.Kill(pid, syscall.SIGSTOP))
	requireLoad(t, d, false)
	require.NoError(t, syscall.Kill(pid, syscall.SIGCONT))
	stop()
	_, err := d.Load()
	require.ErrorIs(t, err, ErrExited)
	requireSerial(t, d, 1)
	_, err = newSource("/certs").Open(pid)
	require.ErrorIs(t, err, ErrExited)
	_, err = newSource("certs").Open(os.Getpid())
	require.ErrorContains(t, err, "not an absolute path")
}

// The pod's process has exited, and another one has its number.
func TestProcessesOfOtherPodsAreNotOpened(t *testing.T) {
	pid, _, stop := startPod(t)
	s := newSource("/certs")
	s.Owns = func(of int) (bool, error) {
		require.Equal(t, pid, of)
		return false, nil
	}
	_, err := s.Open(pid)
	require.ErrorIs(t, err, ErrExited)

	t.Run("whose predecessor exits meanwhile", func(t *testing.T) {
		s.Owns = func(int) (bool, error) {
			stop()
			return true, nil // the number is that of another process of the pod
		}
		_, err := s.Open(pid)
		require.ErrorIs(t, err, ErrExited)
	})
}
