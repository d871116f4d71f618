package proxy

import (
	"context"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/ctrlmesh/ctrlmesh/proxy/fault"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/upstream"
	"github.com/ctrlmesh/ctrlmesh/proxy/writes"
)

// upgrade hands the client's connection over to one of its own upstream.
func (x *exchange) upgrade(client *upstream.Client, protocol string) *outcome {
	x.allowed.waits()
	resp, up, err := client.Upgrade(x.ctx, x.upstreamRequest(), protocol)
	x.reply = resp
	if err != nil {
		x.end = x.completion(nil, err)
		return failure(err)
	}
	x.received = time.Now()
	if up == nil { // refused, for example with 403: an ordinary response
		x.end = x.completion(&x.reply, nil)
		defer func() { _ = x.reply.Body.Close() }()
		if end := x.responses.respond(&x.state, &x.reply); end != nil {
			return end
		}
		x.sendHead(&x.reply)
		x.copyStream(x.reply.Body)
		return nil
	}
	defer func() { _ = up.Close() }()
	if end := x.responses.respond(&x.state, &x.reply); end != nil {
		return end
	}
	if x.faults != nil {
		x.faults.Missed(fault.SlowBody) // there is no body
	}
	dropHopByHop(resp.Header)
	down, buffered, err := x.client.hijack()
	if err != nil {
		return failure(fmt.Errorf("hijack: %w", err))
	}
	defer func() { _ = down.Close() }()
	x.begun, x.code = true, resp.Status
	x.account()
	if err := writeSwitch(down, resp.Header, protocol); err != nil {
		return nil
	}
	x.end = x.splice(down, buffered, up)
	return nil
}

// maxDrained bounds what is read and discarded after the client is gone, in bytes.
const maxDrained = 1 << 20

// splice copies in both directions until one side ends, the pod shuts down, or a policy
// ends the connection. If the apiserver did not end first, splice sends it the end and
// waits for its own: until then, the apiserver may pass on what it received.
func (x *exchange) splice(down io.ReadWriteCloser, early io.Reader, up *upstream.Upgraded) writes.Completion {
	closed := make(chan struct{})
	closeOurs := sync.OnceFunc(func() {
		_ = down.Close()
		_ = up.CloseWrite()
		close(closed)
	})
	defer context.AfterFunc(x.pod.done, closeOurs)()
	defer context.AfterFunc(x.ctx, closeOurs)()
	var wg sync.WaitGroup
	wg.Go(func() {
		defer closeOurs()
		_, _ = io.Copy(up, early) // what the server has buffered, then the connection
	})
	theirs := make(chan struct{})
	from := &lastError{Reader: up}
	go func() {
		defer close(theirs)
		defer closeOurs()
		x.bytes, _ = io.Copy(down, from)
		if from.err == nil {
			closeOurs()
			_, _ = io.CopyN(io.Discard, from, maxDrained)
		}
	}()
	<-closed
	late := time.NewTimer(x.pod.unseen())
	defer late.Stop()
	waited := false
	select {
	case <-theirs:
	case <-late.C:
		waited = true
	case <-x.pod.writing.Done():
	}
	_ = up.Close()
	<-theirs
	wg.Wait()
	switch {
	case waited || from.err != io.EOF && upstream.Ended(from.err): //nolint:errorlint // what io.Reader returns
		return writes.Dropped
	case from.err == io.EOF: //nolint:errorlint // what io.Reader returns
		return writes.Ended
	}
	return writes.NotSeen
}

// lastError remembers how a reader ended.
type lastError struct {
	io.Reader
	err error // nil: it has not
}

func (r *lastError) Read(p []byte) (int, error) {
	n, err := r.Reader.Read(p)
	if err != nil {
		r.err = err
	}
	return n, err
}
