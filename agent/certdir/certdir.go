// Package certdir reads the serving certificate of a webhook from the file system of a pod.
//
// The paths are the pod's: what they name is looked up within its root directory (openat2
// with RESOLVE_IN_ROOT, Linux 5.6), so that a link cannot lead to a file of the node. The
// process needs CAP_SYS_PTRACE for the root directory of another user's process, and
// CAP_DAC_READ_SEARCH for files that only that user may read.
package certdir

import (
	"bytes"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/ctrlmesh/ctrlmesh/internal/descriptor"
	"github.com/ctrlmesh/ctrlmesh/internal/failure"
)

// The names of the files, as kubernetes.io/tls Secrets and controller-runtime have them.
const (
	certFile = "tls.crt"
	keyFile  = "tls.key"
)

// Bounds of the files in bytes: thirty certificates, and five times the longest RSA key that
// is accepted.
const (
	maxCert = 64 << 10
	maxKey  = 16 << 10
)

var (
	// ErrExited means that the process whose files are read has exited.
	ErrExited = errors.New("the process has exited")
	// ErrNone means that no certificate was read yet.
	ErrNone = errors.New("the webhook's certificate has not been read yet")
)

// Source is the directory of a certificate, and its key, in the file systems of a pod's
// processes. Its methods are safe for concurrent use.
type Source struct {
	// Path is absolute.
	Path string
	// Owns reports whether a process is the pod's. It fails if the process has exited.
	Owns func(pid int) (bool, error)

	parser
}

// Dir is the directory of one process. The certificate and its key are kept in memory. It is
// safe for concurrent use.
type Dir struct {
	source  *Source
	process *os.File // a pidfd: it is never another process
	root    string

	loading sync.Mutex // of files, which may block

	mu        sync.Mutex
	cert, key []byte // as the files had them
	pair      *tls.Certificate
}

// Open opens the directory of a process. It reads no file yet, see [Dir.Load]. A process that
// has got the number of one of the pod's is not opened.
func (s *Source) Open(pid int) (*Dir, error) {
	if !path.IsAbs(s.Path) {
		return nil, fmt.Errorf("directory of the webhook's certificate: %q is not an absolute path", s.Path)
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		if errors.Is(err, unix.ESRCH) {
			err = ErrExited
		}
		return nil, fmt.Errorf("opening process %d: %w", pid, err)
	}
	d := &Dir{source: s, process: os.NewFile(uintptr(fd), "pidfd"), root: fmt.Sprintf("/proc/%d/root", pid)}
	if err := d.checkOwner(pid); err != nil {
		_ = d.Close()
		return nil, fmt.Errorf("opening process %d: %w", pid, err)
	}
	return d, nil
}

// checkOwner returns ErrExited unless the process is the pod's. The number is still that of
// the process if that is alive afterwards.
func (d *Dir) checkOwner(pid int) error {
	owns, err := d.source.Owns(pid)
	if exited := d.checkAlive(); exited != nil {
		return exited
	}
	if err == nil && !owns {
		return ErrExited // the number is another pod's process now
	}
	return failure.Wrap(err, "finding the pod of the process")
}

// Load reads the files, and reports whether the certificate changed. After an error the last
// valid certificate stays, for instance when the files are of two generations: call it again.
//
// It may block as long as the pod's file system does. Call it every few seconds: it notices
// any change of the contents, also by a change of links, as the kubelet makes it.
func (d *Dir) Load() (changed bool, err error) {
	d.loading.Lock()
	defer d.loading.Unlock()
	cert, key, err := d.read()
	if err != nil {
		return false, fmt.Errorf("reading the webhook's certificate in %s: %w", d.source.Path, err)
	}
	if d.pair != nil && bytes.Equal(cert, d.cert) && bytes.Equal(key, d.key) {
		return false, nil
	}
	pair, err := d.source.parse(cert, key)
	if err != nil {
		return false, fmt.Errorf("reading the webhook's certificate in %s: %w", d.source.Path, err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.cert, d.key, d.pair = cert, key, pair
	return true, nil
}

// read returns the contents of both files. The root directory is open only meanwhile: it
// would keep the pod's mounts in use.
func (d *Dir) read() (cert, key []byte, err error) {
	number, err := unix.Open(d.root, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err == nil {
		defer unix.Close(number)
	}
	// After it was opened: the path may be that of a later process with the same number.
	if exited := d.checkAlive(); exited != nil {
		return nil, nil, exited
	}
	if err != nil {
		return nil, nil, fmt.Errorf("opening the root directory of the process: %w", err)
	}
	if cert, err = readIn(number, path.Join(d.source.Path, certFile), maxCert); err != nil {
		return nil, nil, err
	}
	key, err = readIn(number, path.Join(d.source.Path, keyFile), maxKey)
	return cert, key, err
}

// checkAlive returns ErrExited once the process has exited, whether or not its parent knows.
func (d *Dir) checkAlive() error {
	return descriptor.Control(d.process, func(fd int) error {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
		if n > 0 {
			return ErrExited
		}
		return os.NewSyscallError("poll", err)
	})
}

// readIn reads a regular file of at most maxSize bytes. The path and all links are looked up
// within the root.
func readIn(root int, name string, maxSize int) ([]byte, error) {
	how := &unix.OpenHow{
		// A named pipe would block.
		Flags:   unix.O_RDONLY | unix.O_CLOEXEC | unix.O_NOCTTY | unix.O_NONBLOCK,
		Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS,
	}
	const attempts = 16 // EAGAIN: something was renamed meanwhile
	var number int
	var err error
	for range attempts {
		if number, err = unix.Openat2(root, name, how); !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EINTR) {
			break
		}
	}
	if err != nil {
		return nil, &os.PathError{Op: "openat2", Path: name, Err: err}
	}
	f := os.NewFile(uintptr(number), name)
	defer f.Close()
	switch info, err := f.Stat(); {
	case err != nil:
		return nil, err
	case !info.Mode().IsRegular():
		return nil, fmt.Errorf("%s is not a regular file", name)
	}
	content, err := io.ReadAll(io.LimitReader(f, int64(maxSize)+1))
	if err == nil && len(content) > maxSize {
		err = fmt.Errorf("%s is larger than %d bytes", name, maxSize)
	}
	return content, failure.Wrap(err, "reading")
}

// GetCertificate returns the last valid certificate, for [tls.Config].
func (d *Dir) GetCertificate(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.pair == nil {
		return nil, ErrNone
	}
	return d.pair, nil
}

// Close closes the handle of the process. The last certificate stays.
func (d *Dir) Close() error { return d.process.Close() }
