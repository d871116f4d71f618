package capture

import (
	"net"
	"net/netip"
	"os"
	"slices"

	"github.com/ctrlmesh/ctrlmesh/agent/capture/listener"
)

// Files are copies of a pod's listeners, which one agent passes to the next, so that no
// connection is refused in between.
type Files struct {
	Listeners []*os.File
	Egress    []*os.File // those of [Pod.SetEgress]
	Inbound   []*os.File // those of package inbound, which Capture ignores
}

// Close closes the files, unless f is nil. They may have been closed before.
func (f *Files) Close() {
	if f == nil {
		return
	}
	for _, file := range slices.Concat(f.Listeners, f.Egress, f.Inbound) {
		_ = file.Close()
	}
}

// listeners returns listeners for the files that are valid, by address.
func (f *Files) listeners(namespace *os.File) (listeners, egress map[netip.Addr]*net.TCPListener) {
	if f == nil {
		return nil, nil
	}
	return listener.Received(f.Listeners, namespace), listener.Received(f.Egress, namespace)
}
