package takeover

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ctrlmesh/ctrlmesh/internal/failure"
)

// Offer is the pods of the agent that serves. That agent serves them until Serving is called.
type Offer struct {
	Pods []Pod
	// Drained is closed when, after Serving, nothing of the other agent is in flight any
	// more, or it died: then its last writes may still take effect.
	Drained <-chan struct{}

	peer    peer
	drained chan struct{}
}

// Probe asks the agent that serves at path, if there is one, whether an agent whose pod
// started then may take over. The error is ErrRefused if not. It changes nothing.
func Probe(ctx context.Context, path string, podStart time.Duration) (there bool, err error) {
	p, err := dial(ctx, path)
	if err != nil || p == nil {
		return err != nil, err
	}
	defer p.conn.Close()
	within(p.conn, answerWithin)
	return true, p.request(message{Ask: probe, PodStart: podStart})
}

// Ask asks the agent that serves at path for an offer, which is nil without such an
// agent. An agent that does not answer in time counts as exited: the error is not
// ErrRefused then.
func Ask(ctx context.Context, path string, podStart time.Duration) (*Offer, error) {
	p, err := dial(ctx, path)
	if err != nil || p == nil {
		return nil, err
	}
	within(p.conn, answerWithin)
	err = p.send(message{Ask: takeOver, PodStart: podStart})
	var pods []Pod
	if err == nil {
		pods, err = p.receivePods()
	}
	if err != nil {
		p.conn.Close()
		return nil, fmt.Errorf("requesting the pods of the agent before this one: %w", err)
	}
	drained := make(chan struct{})
	return &Offer{Pods: pods, Drained: drained, peer: *p, drained: drained}, nil
}

// Serving notifies the other agent that this one serves what was offered. It returns once
// that agent has closed its listeners, with the counts of its rules by pod uid. The offer is
// closed when that agent has drained.
func (o *Offer) Serving() (traffic map[string][]byte, err error) {
	within(o.peer.conn, 2*answerWithin)
	if err = o.peer.send(message{Ask: serving}); err == nil {
		traffic, err = o.peer.receiveTraffic()
	}
	lost := err
	go func() {
		defer close(o.drained)
		defer o.peer.conn.Close()
		_ = o.peer.conn.SetDeadline(time.Time{})
		for lost == nil {
			_, lost = o.peer.next()
		}
	}()
	return traffic, failure.Wrap(err, "notifying the agent before this one")
}

// Close declines the offer.
func (o *Offer) Close() {
	Close(o.Pods)
	o.peer.conn.Close()
}

// Stop asks the agent that serves at path, if there is one, to stop for good. It returns
// when that agent captures nothing any more.
func Stop(ctx context.Context, path string) error {
	p, err := dial(ctx, path)
	if err != nil || p == nil {
		return err
	}
	defer p.conn.Close()
	defer context.AfterFunc(ctx, func() { within(p.conn, -time.Second) })()
	return failure.Wrap(p.request(message{Ask: stop}), "asking the running agent to stop")
}

// dial returns nil if there is no listener at path.
func dial(ctx context.Context, path string) (*peer, error) {
	dialer := net.Dialer{Timeout: answerWithin}
	conn, err := dialer.DialContext(ctx, network, path)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ECONNREFUSED) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("connecting to the running agent: %w", err)
	}
	unixConn := conn.(*net.UnixConn) // the type of this network
	if err := trust(unixConn); err != nil {
		conn.Close()
		return nil, fmt.Errorf("connecting to the running agent: %w", err)
	}
	return &peer{unixConn}, nil
}
