package proxy

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/net/http/httpguts"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/ctrlmesh/ctrlmesh/proxy/fault"
	"github.com/ctrlmesh/ctrlmesh/proxy/status"
	"github.com/ctrlmesh/ctrlmesh/proxy/upstream"
)

// upgradeOf returns the protocol r asks to change to, "" for none. Refused, not
// stripped, is every other use of the header: a client that asked for h2c and
// is served HTTP/1.1 is a client that two servers may understand differently.
func upgradeOf(r *http.Request, p *plan) (string, *apierrors.StatusError) {
	values := r.Header["Upgrade"]
	asked := httpguts.HeaderValuesContainsToken(r.Header["Connection"], "upgrade")
	if len(values) == 0 && !asked {
		return "", nil
	}
	switch {
	case len(values) != 1 || !asked || r.ProtoMajor != 1:
		return "", status.BadRequest("malformed upgrade")
	case !strings.EqualFold(values[0], "SPDY/3.1") && !strings.EqualFold(values[0], "websocket"):
		return "", status.BadRequest("an upgrade to %q is not proxied", bounded(values[0]))
	case !p.upgrades:
		return "", status.BadRequest("this resource is not upgraded")
	case r.ContentLength != 0:
		return "", status.BadRequest("an upgrade has no body")
	}
	return values[0], nil
}

// upgrade hands the client's connection over to one of its own upstream.
func (x *exchange) upgrade(client *upstream.Client, protocol string) {
	x.allowed.waits()
	resp, up, err := client.Upgrade(x.ctx, x.upstreamRequest(), protocol)
	if err != nil {
		x.failed(err)
		return
	}
	x.head = time.Now()
	if up == nil { // refused, for example 403: an answer like any other
		defer func() { _ = resp.Body.Close() }()
		x.sendHead(resp)
		x.copyStream(resp.Body)
		return
	}
	defer func() { _ = up.Close() }()
	if x.resetAfter(); x.faults != nil {
		x.faults.Missed(fault.SlowBody) // what comes now is no body
	}
	stripHopByHop(resp.Header)
	down, buffered, err := http.NewResponseController(x.w).Hijack()
	if err != nil {
		x.failed(fmt.Errorf("hijack: %w", err))
		return
	}
	defer func() { _ = down.Close() }()
	x.wrote, x.code = true, resp.StatusCode
	x.account()
	// The server's deadlines do not hold for what the connection is now.
	if c := connOf(x.r); c != nil {
		c.upgraded.Store(true)
	}
	_ = down.SetDeadline(time.Time{})
	if err := writeSwitch(down, resp, protocol); err != nil {
		return
	}
	x.splice(down, buffered, up)
}

func writeSwitch(w io.Writer, resp *http.Response, protocol string) error {
	resp.Header["Connection"] = []string{"Upgrade"}
	resp.Header["Upgrade"] = []string{protocol}
	var head strings.Builder
	head.WriteString("HTTP/1.1 101 Switching Protocols\r\n")
	if err := resp.Header.Write(&head); err != nil {
		return err
	}
	head.WriteString("\r\n")
	_, err := io.WriteString(w, head.String())
	return err
}

// splice copies both ways until one side ends, the pod shuts down, or the policy
// cuts them.
func (x *exchange) splice(down io.ReadWriteCloser, early io.Reader, up io.ReadWriteCloser) {
	closeBoth := sync.OnceFunc(func() {
		_ = down.Close()
		_ = up.Close()
	})
	defer context.AfterFunc(x.pod.done, closeBoth)()
	defer context.AfterFunc(x.ctx, closeBoth)()
	var received atomic.Int64
	var wg sync.WaitGroup
	wg.Go(func() {
		defer closeBoth()
		_, _ = io.Copy(up, early) // the server's reader: what it holds, then the connection
	})
	wg.Go(func() {
		defer closeBoth()
		n, _ := io.Copy(down, up)
		received.Store(n)
	})
	wg.Wait()
	x.bytes = received.Load()
}
