package takeover

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/ctrlmesh/ctrlmesh/internal/failure"
)

const network = "unixpacket" // a stream of messages, each with its files

const (
	// answerWithin bounds one message.
	answerWithin = 2 * time.Second
	// serveWithin is how long a successor may take to capture a full node.
	serveWithin = 20 * time.Second
	// maxPeers bounds the connections that are answered at once.
	maxPeers = 4
)

// MaxExit is how long an agent takes at most from the signal to stop until its process
// ends. It is less than the termination grace of its pod.
const MaxExit = 27 * time.Second

// Incumbent is the agent that serves. Its methods, except MayTakeOver, are called one at a time.
type Incumbent interface {
	// MayTakeOver returns why an agent whose pod started then must not take over, nil if it may.
	MayTakeOver(podStart time.Duration) error
	// Offer stops new captures and returns the captured pods. The files are copies that the
	// caller closes. The agent continues to serve.
	Offer(ctx context.Context) ([]Pod, error)
	// Yield is called when another agent serves what was offered, or has taken over
	// without asking. It returns when the other alone accepts connections. drained is
	// closed, or nil, when nothing of this agent is in flight any more.
	Yield(ctx context.Context) (drained <-chan struct{}, err error)
	// Traffic is called after Yield and returns the counts of the pods' rules by uid.
	Traffic(ctx context.Context) map[string][]byte
	// Resume is called instead of Yield when the other agent has exited.
	Resume(ctx context.Context) error
	// Stop stops serving and capturing, for good.
	Stop(ctx context.Context) error
}

// Socket is where the agent that serves answers its successor.
type Socket struct {
	path     string
	aside    string      // where it was created
	self     os.FileInfo // the socket itself, wherever it was moved
	listener *net.UnixListener
	logger   *slog.Logger
}

// ID identifies a socket among all others since the node booted: an inode may be reused,
// but not with the same time. It is zero if there is no socket.
type ID [2]int64

func idOf(info os.FileInfo) ID {
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return ID{}
	}
	return ID{int64(stat.Ino), info.ModTime().UnixNano()} // compared only
}

// At returns the ID of the socket at path.
func At(path string) ID {
	info, err := os.Lstat(path)
	if err != nil {
		return ID{}
	}
	return idOf(info)
}

// ID returns the identity of the socket.
func (s *Socket) ID() ID { return idOf(s.self) }

// Listen creates a socket beside path, and Take moves it there: errors occur before another
// agent stops serving.
func Listen(path string, logger *slog.Logger) (*Socket, error) {
	s, err := listen(path, logger)
	return s, failure.Wrap(err, "listening for the next agent")
}

func listen(path string, logger *slog.Logger) (*Socket, error) {
	dir := filepath.Dir(path)
	if err := errors.Join(os.MkdirAll(dir, 0o700), os.Chmod(dir, 0o700)); err != nil {
		return nil, err
	}
	// The rename in Take is atomic: there is always a socket at path.
	aside := fmt.Sprintf("%s.%d", path, os.Getpid())
	if err := os.Remove(aside); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	listener, err := net.ListenUnix(network, &net.UnixAddr{Name: aside, Net: network})
	if err != nil {
		return nil, err
	}
	listener.SetUnlinkOnClose(false) // path may be another agent's by then
	s := &Socket{path: path, aside: aside, listener: listener, logger: logger}
	if err = os.Chmod(aside, 0o600); err == nil {
		s.self, err = os.Lstat(aside)
	}
	if err != nil {
		_ = s.Close()
		return nil, err
	}
	return s, nil
}

// Take makes this process the one that answers at path. The agent that answered there
// before notices it by Current only.
func (s *Socket) Take() error {
	return failure.Wrap(os.Rename(s.aside, s.path), "replacing the socket of the agent before this one")
}

// Current reports whether the socket at the path is this process's: another agent may have
// replaced it, or a cleanup may have removed it.
func (s *Socket) Current() bool {
	info, err := os.Lstat(s.path)
	return err == nil && os.SameFile(info, s.self)
}

// Close stops listening. Answers that have begun continue.
func (s *Socket) Close() error {
	_ = os.Remove(s.aside) // if it was never taken
	return s.listener.Close()
}

// Serve answers until ctx ends or the socket is closed. It finishes answers that have
// begun by then.
func (s *Socket) Serve(ctx context.Context, h Incumbent) {
	defer context.AfterFunc(ctx, func() { _ = s.Close() })()
	one := make(chan struct{}, 1) // a semaphore: one request at a time
	peers := make(chan struct{}, maxPeers)
	for {
		conn, err := s.listener.AcceptUnix()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			s.logger.Error("failed to accept another agent", "error", err)
			time.Sleep(answerWithin) // out of descriptors, most likely
			continue
		}
		select {
		case peers <- struct{}{}:
		default:
			conn.Close()
			continue
		}
		go func() {
			defer func() { <-peers }()
			defer conn.Close()
			if err := s.answer(ctx, conn, h, one); err != nil {
				s.logger.Error("failed to answer another agent", "error", err)
			}
		}()
	}
}

func (s *Socket) answer(ctx context.Context, conn *net.UnixConn, h Incumbent, one chan struct{}) error {
	if err := trust(conn); err != nil {
		return err
	}
	p := peer{conn}
	within(conn, answerWithin)
	m, err := p.next()
	if err != nil {
		return fmt.Errorf("reading the request: %w", err)
	}
	if m.Ask == probe {
		return p.send(answerOf(h.MayTakeOver(m.PodStart)))
	}
	patience := answerWithin / 2 // a successor does not wait for longer
	if m.Ask == stop {
		patience = 2 * serveWithin
	}
	select {
	case one <- struct{}{}:
		defer func() { <-one }()
	case <-time.After(patience):
		return p.conclude(errors.New("another request is in progress"))
	}
	switch m.Ask {
	case takeOver:
		if err := h.MayTakeOver(m.PodStart); err != nil {
			return p.conclude(err)
		}
		return s.passOn(ctx, p, h)
	case stop:
		s.logger.Info("stopping for good, as requested")
		return p.conclude(h.Stop(ctx))
	default:
		return p.send(message{Error: fmt.Sprintf("unknown request %q", m.Ask)})
	}
}

// passOn passes the pods to a successor.
func (s *Socket) passOn(ctx context.Context, p peer, h Incumbent) error {
	pods, err := h.Offer(ctx)
	if err != nil {
		return errors.Join(err, p.send(answerOf(err)))
	}
	s.logger.Info("a successor takes over", "pods", len(pods))
	err = p.sendPods(pods)
	Close(pods)
	if err == nil {
		within(p.conn, serveWithin)
		var m message
		m, err = p.next()
		if err == nil && m.Ask != serving {
			err = fmt.Errorf("unexpected request %q", m.Ask)
		}
	}
	if err != nil && s.Current() {
		return errors.Join(fmt.Errorf("passing the pods to the successor: %w", err), h.Resume(ctx))
	}
	drained, err := h.Yield(ctx)
	if err == nil {
		within(p.conn, answerWithin)
		err = p.sendTraffic(h.Traffic(ctx))
	} else {
		err = p.conclude(err)
	}
	if drained != nil {
		<-drained // the end of the connection, or of this process, notifies the successor
	}
	return err
}

// conclude answers that the request was carried out, or why not.
func (p peer) conclude(err error) error {
	within(p.conn, answerWithin)
	return errors.Join(err, p.send(answerOf(err)))
}

func answerOf(err error) (m message) {
	if err != nil {
		m.Error, m.Refused = err.Error(), true
	}
	return m
}
