package bpf

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

var (
	// ErrUnsupported means that redirection by BPF is impossible on this node: the
	// kernel lacks a feature, or a mount or a permission is missing. Another capture
	// mode may work.
	ErrUnsupported = errors.New("redirection by BPF is not possible here")

	// ErrHookOwned means that another program is attached to the connect hooks of the
	// cgroup exclusively. It is an [ErrUnsupported] too.
	ErrHookOwned = fmt.Errorf("%w: another program is attached to the cgroup's connect hook exclusively", ErrUnsupported)
)

// unsupported wraps err in ErrUnsupported if a missing kernel feature or permission caused it.
func unsupported(err error) error {
	var rejected *ebpf.VerifierError
	if errors.Is(err, ebpf.ErrNotSupported) || errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES) || errors.As(err, &rejected) {
		return fmt.Errorf("%w: %w", ErrUnsupported, err)
	}
	return err
}
