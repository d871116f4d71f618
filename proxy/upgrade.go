package proxy

import (
	"context"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"

	"golang.org/x/net/http/httpguts"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/ctrlmesh/ctrlmesh/proxy/fault"
	"github.com/ctrlmesh/ctrlmesh/proxy/status"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/upstream"
	"github.com/ctrlmesh/ctrlmesh/proxy/writes"
)

// upgradeStage reads the protocol that a request asks to change to. It refuses, and
// does not strip, every other use of the header: a client that asked for h2c and
// is served HTTP/1.1 is a client that two servers may understand differently.
type upgradeStage struct {
	// allowed: the resource is one whose connection may change protocol.
	allowed bool
}

func (s upgradeStage) apply(x *exchange) *outcome {
	protocol, refused := s.protocol(&x.req)
	if refused != nil {
		return refusalBy(meshv1.RefusedUpgrade, refused)
	}
	x.protocol = protocol
	return nil
}

// protocol returns the protocol r asks to change to, "" for none.
func (s upgradeStage) protocol(r *request) (string, *apierrors.StatusError) {
	values := r.header["Upgrade"]
	asked := httpguts.HeaderValuesContainsToken(r.header["Connection"], "upgrade")
	if len(values) == 0 && !asked {
		return "", nil
	}
	switch {
	case len(values) != 1 || !asked || r.proto == proto2:
		return "", status.BadRequest("malformed upgrade")
	case !strings.EqualFold(values[0], "SPDY/3.1") && !strings.EqualFold(values[0], "websocket"):
		return "", status.BadRequest("an upgrade to %q is not proxied", bounded(values[0]))
	case !s.allowed:
		return "", status.BadRequest("this resource is not upgraded")
	case r.length != 0:
		return "", status.BadRequest("an upgrade has no body")
	}
	return values[0], nil
}

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
	if up == nil { // refused, for example 403: an answer like any other
		x.end = x.completion(&x.reply, nil)
		defer func() { _ = x.reply.Body.Close() }()
		if end := x.responses.respond(x, &x.reply); end != nil {
			return end
		}
		x.sendHead(&x.reply)
		x.copyStream(x.reply.Body)
		return nil
	}
	defer func() { _ = up.Close() }()
	if end := x.responses.respond(x, &x.reply); end != nil {
		return end
	}
	if x.faults != nil {
		x.faults.Missed(fault.SlowBody) // what comes now is no body
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

// maxDrained is how much is read that nobody receives any more, in bytes.
const maxDrained = 1 << 20

// splice copies both ways until one side ends, the pod shuts down, or the policy
// cuts them. If it is not the apiserver's that ends first, splice sends it the end and
// waits for its own: before that, the apiserver may pass on what it was sent.
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
		_, _ = io.Copy(up, early) // the server's reader: what it holds, then the connection
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
