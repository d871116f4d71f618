package bpf

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

var (
	// ErrUnsupported means that this node does not let redirection by BPF be: the
	// kernel, a mount or a permission is lacking. Another way of capture may work.
	ErrUnsupported = errors.New("redirection by BPF is not possible here")

	// ErrHookOwned means that somebody else holds the connect hooks of the cgroup
	// for themselves alone. It is an [ErrUnsupported] too.
	ErrHookOwned = fmt.Errorf("%w: another owner holds the cgroup's connect hook exclusively", ErrUnsupported)
)

// unsupported marks err with ErrUnsupported if the kernel or a permission is behind it.
func unsupported(err error) error {
	var rejected *ebpf.VerifierError
	if errors.Is(err, ebpf.ErrNotSupported) || errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES) || errors.As(err, &rejected) {
		return fmt.Errorf("%w: %w", ErrUnsupported, err)
	}
	return err
}
