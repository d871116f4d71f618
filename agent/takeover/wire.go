package takeover

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ctrlmesh/ctrlmesh/agent/capture"
	"github.com/ctrlmesh/ctrlmesh/internal/descriptor"
)

const (
	maxMessage = 64 << 10
	maxFiles   = 253 // the kernel's bound for one message
	maxPods    = 4096
	// piece bounds the counts of rules in one message, in bytes.
	piece = 32 << 10
	// maxTraffic bounds the counts of one pod that are received.
	maxTraffic = 8 << 20
)

// Pod is a captured pod that one agent offers to another.
type Pod struct {
	UID       string `json:"uid"`
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	// Version of the policy that the first agent has confirmed to the manager.
	Version string `json:"version,omitempty"`
	// Traffic is the counts of its rules; nil if there are none, or too many to send
	// before Serving.
	Traffic []byte `json:"traffic,omitempty"`
	// Journaled is true if the first agent keeps a journal of its writes.
	Journaled bool `json:"journaled,omitempty"`
	// Files is nil if the first agent could not copy its listeners.
	Files *capture.Files `json:"-"`
}

// Requests.
const (
	probe    = "knock"     // answered by whether takeOver would be refused
	takeOver = "take over" // answered by the pods
	serving  = "serving"   // after takeOver; answered when the listeners are closed
	stop     = "stop"      // answered when nothing is captured any more
)

type message struct {
	Ask string `json:"ask,omitempty"`
	// PodStart is when the pod of the asking agent first started, since the node booted.
	PodStart time.Duration `json:"born,omitempty"`

	// An answer.
	Pods  []podMessage `json:"pods,omitempty"`
	More  bool         `json:"more,omitempty"` // another message with pods follows
	Error string       `json:"error,omitempty"`
	// Refused means that the request was understood and denied.
	Refused bool `json:"refused,omitempty"`
}

// ErrRefused is the answer of an agent that runs and denies a request.
var ErrRefused = errors.New("the agent that serves this node's pods refuses")

func (m message) err() error {
	switch {
	case m.Error == "":
		return nil
	case m.Refused:
		return fmt.Errorf("%w: %s", ErrRefused, m.Error)
	}
	return errors.New(m.Error)
}

// podMessage is a Pod. Its listeners are the next files of the message, those for egress
// last, those of inbound connections before these. An agent that does not know egress or
// inbound connections closes theirs as surplus listeners.
type podMessage struct {
	Pod
	Handed    bool `json:"handed"`
	Listeners int  `json:"listeners"`
	Egress    int  `json:"egress,omitempty"`  // how many of Listeners
	Inbound   int  `json:"inbound,omitempty"` // how many of Listeners
}

// peer is one end of a connection.
type peer struct{ conn *net.UnixConn }

func (p peer) send(m message, files ...*os.File) error {
	b, err := json.Marshal(m)
	if err != nil {
		return err
	}
	var oob []byte
	if len(files) > 0 {
		fds := make([]int, len(files))
		for i, f := range files {
			// Its method Fd would make a listener blocking that this agent still accepts from.
			if err := descriptor.Control(f, func(fd int) error { fds[i] = fd; return nil }); err != nil {
				return err
			}
		}
		oob = unix.UnixRights(fds...)
	}
	_, _, err = p.conn.WriteMsgUnix(b, oob, nil)
	runtime.KeepAlive(files)
	return err
}

// receive returns the next message. The caller closes the files.
func (p peer) receive() (message, []*os.File, error) {
	b, oob := make([]byte, maxMessage), make([]byte, unix.CmsgSpace(4*maxFiles))
	n, oobn, flags, _, err := p.conn.ReadMsgUnix(b, oob)
	if err != nil {
		return message{}, nil, err
	}
	files, err := parseFiles(oob[:oobn])
	var m message
	switch {
	case err != nil:
	case n == 0:
		err = net.ErrClosed
	case flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0:
		err = errors.New("a message is too long")
	default:
		err = json.Unmarshal(b[:n], &m)
	}
	if err != nil {
		closeAll(files)
		return message{}, nil, err
	}
	return m, files, nil
}

func parseFiles(oob []byte) (files []*os.File, err error) {
	if len(oob) == 0 {
		return nil, nil
	}
	parts, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, err
	}
	for _, part := range parts {
		fds, err := unix.ParseUnixRights(&part)
		if err != nil {
			continue // other control messages, such as credentials
		}
		for _, fd := range fds {
			files = append(files, os.NewFile(uintptr(fd), "listener"))
		}
	}
	return files, nil
}

// sendPods sends pods in as many messages as they need.
func (p peer) sendPods(pods []Pod) error {
	for {
		var m message
		var files []*os.File
		size := len(`{"pods":[],"more":true}`)
		for len(pods) > 0 {
			pm, of := offered(pods[0])
			encoded, err := json.Marshal(pm)
			if err != nil {
				return err
			}
			size += len(encoded) + len(",")
			if len(m.Pods) > 0 && (size > maxMessage || len(files)+len(of) > maxFiles) {
				break
			}
			m.Pods, files, pods = append(m.Pods, pm), append(files, of...), pods[1:]
		}
		m.More = len(pods) > 0
		if err := p.send(m, files...); err != nil {
			return err
		}
		if !m.More {
			return nil
		}
	}
}

// offered returns what the first answer says of a pod, and its listeners.
func offered(p Pod) (podMessage, []*os.File) {
	pm := podMessage{Pod: p}
	if len(pm.Traffic) > piece/2 { // it is sent later
		pm.Traffic = nil
	}
	h := p.Files
	if h == nil {
		return pm, nil
	}
	pm.Handed, pm.Egress, pm.Inbound = true, len(h.Egress), len(h.Inbound)
	pm.Listeners = len(h.Listeners) + pm.Inbound + pm.Egress
	return pm, slices.Concat(h.Listeners, h.Inbound, h.Egress)
}

// receivePods receives what sendPods sends.
func (p peer) receivePods() ([]Pod, error) {
	var pods []Pod
	fail := func(err error) ([]Pod, error) {
		Close(pods)
		return nil, err
	}
	for {
		m, files, err := p.receive()
		if err = cmp.Or(err, m.err()); err != nil {
			closeAll(files)
			return fail(err)
		}
		for _, pm := range m.Pods {
			if pm.Egress < 0 || pm.Inbound < 0 || pm.Listeners < pm.Egress+pm.Inbound || pm.Listeners > len(files) {
				closeAll(files)
				return fail(errors.New("listeners are missing"))
			}
			if pm.Handed {
				egress := pm.Listeners - pm.Egress
				inbound := egress - pm.Inbound
				pm.Files = &capture.Files{Listeners: files[:inbound:inbound], Inbound: files[inbound:egress:egress], Egress: files[egress:pm.Listeners:pm.Listeners]}
				files = files[pm.Listeners:]
			}
			pods = append(pods, pm.Pod)
		}
		closeAll(files)
		switch {
		case len(pods) > maxPods || m.More && len(m.Pods) == 0:
			return fail(errors.New("too many pods"))
		case !m.More:
			return pods, nil
		}
	}
}

// sendTraffic answers a request of serving, with the counts of the rules by then. An agent
// that does not know them ignores the messages after the first.
func (p peer) sendTraffic(traffic map[string][]byte) error {
	var pieces []podMessage
	for uid, data := range traffic {
		for part := range slices.Chunk(data, piece) {
			pieces = append(pieces, podMessage{Pod: Pod{UID: uid, Traffic: part}})
		}
	}
	err := p.send(message{More: len(pieces) > 0})
	for i := 0; err == nil && i < len(pieces); i++ {
		err = p.send(message{Pods: pieces[i : i+1], More: i+1 < len(pieces)})
	}
	return err
}

// receiveTraffic receives what sendTraffic sends. An older agent sends the first message
// only.
func (p peer) receiveTraffic() (map[string][]byte, error) {
	traffic := map[string][]byte{}
	for first := true; ; first = false {
		m, err := p.next()
		if err != nil {
			return nil, err
		}
		for _, pm := range m.Pods {
			traffic[pm.UID] = append(traffic[pm.UID], pm.Traffic...)
			if len(traffic) > maxPods || len(traffic[pm.UID]) > maxTraffic {
				return nil, errors.New("too many counts of rules")
			}
		}
		switch {
		case !m.More:
			return traffic, nil
		case !first && len(m.Pods) == 0:
			return nil, errors.New("too many counts of rules")
		}
	}
}

// next returns the next message, which needs no files, or the error in it.
func (p peer) next() (message, error) {
	m, files, err := p.receive()
	closeAll(files)
	return m, cmp.Or(err, m.err())
}

// request sends a request and waits for its answer.
func (p peer) request(m message) error {
	err := p.send(m)
	if err == nil {
		_, err = p.next()
	}
	return err
}

// Close closes the files of pods that are not taken over.
func Close(pods []Pod) {
	for _, p := range pods {
		p.Files.Close()
	}
}

func closeAll(files []*os.File) {
	for _, f := range files {
		_ = f.Close()
	}
}

// trust rejects a peer that does not run as the user of this process, which is root.
func trust(conn *net.UnixConn) error {
	return descriptor.Control(conn, func(fd int) error {
		cred, err := unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED)
		if err == nil && int(cred.Uid) != os.Geteuid() {
			return fmt.Errorf("the peer runs as user %d, not as %d", cred.Uid, os.Geteuid())
		}
		return os.NewSyscallError("getsockopt", err)
	})
}

func within(conn *net.UnixConn, d time.Duration) { _ = conn.SetDeadline(time.Now().Add(d)) }
