package handover

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"time"

	"golang.org/x/sys/unix"
)

// Offer is what the agent that serves hands over, and goes on serving until it
// is told of Serving.
type Offer struct {
	Pods []Pod
	// Drained is closed when, after Serving, the other agent has nothing under way
	// any more, or died: then what it lost a moment ago may still take effect.
	Drained <-chan struct{}

	peer    peer
	drained chan struct{}
}

// Knock asks who serves at path, if anybody is there, whether an agent whose pod
// was born then may take over; no is ErrRefused. It changes nothing.
func Knock(ctx context.Context, path string, born time.Duration) (there bool, err error) {
	p, err := dial(ctx, path)
	if err != nil || p == nil {
		return err != nil, err
	}
	defer p.conn.Close()
	within(p.conn, answerWithin)
	if err = p.send(message{Ask: knock, Born: born}); err == nil {
		err = p.done()
	}
	return true, err
}

// Ask asks the agent that serves at path to hand over. Without one, the offer is
// nil. One that does not answer in time counts as dead: the error is another than
// ErrRefused.
func Ask(ctx context.Context, path string, born time.Duration) (*Offer, error) {
	p, err := dial(ctx, path)
	if err != nil || p == nil {
		return nil, err
	}
	within(p.conn, answerWithin)
	err = p.send(message{Ask: takeOver, Born: born})
	var pods []Pod
	if err == nil {
		pods, err = p.receivePods()
	}
	if err != nil {
		p.conn.Close()
		return nil, fmt.Errorf("asking the agent before this one to hand over: %w", err)
	}
	drained := make(chan struct{})
	return &Offer{Pods: pods, Drained: drained, peer: *p, drained: drained}, nil
}

// Serving tells the other agent to let go of what it offered, and returns when
// it has, with what its rules have counted until then, by pod. The offer is closed when
// that agent has drained.
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
			lost = o.peer.done()
		}
	}()
	if err != nil {
		return nil, fmt.Errorf("telling the agent before this one to let go: %w", err)
	}
	return traffic, nil
}

// Close is for an offer that is not taken.
func (o *Offer) Close() {
	Close(o.Pods)
	o.peer.conn.Close()
}

// Stop asks the agent that serves at path, if there is one, to stop for good, and
// returns when it has captured nothing any more.
func Stop(ctx context.Context, path string) error {
	p, err := dial(ctx, path)
	if err != nil || p == nil {
		return err
	}
	defer p.conn.Close()
	defer context.AfterFunc(ctx, func() { within(p.conn, -time.Second) })()
	if err = p.send(message{Ask: stop}); err == nil {
		err = p.done()
	}
	if err != nil {
		return fmt.Errorf("asking the running agent to stop: %w", err)
	}
	return nil
}

// dial returns nil where nobody listens.
func dial(ctx context.Context, path string) (*peer, error) {
	dialer := net.Dialer{Timeout: answerWithin}
	conn, err := dialer.DialContext(ctx, network, path)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ECONNREFUSED) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("looking for a running agent: %w", err)
	}
	unixConn := conn.(*net.UnixConn) //nolint:forcetypeassert // what this network is
	if err := trust(unixConn); err != nil {
		conn.Close()
		return nil, fmt.Errorf("looking for a running agent: %w", err)
	}
	return &peer{unixConn}, nil
}
