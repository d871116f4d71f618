package proxy

import (
	"context"
	"net/http"
	"time"

	"github.com/ctrlmesh/ctrlmesh/proxy/status"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/upstream"
)

// upstreamRequest returns the request as the stages have edited it.
func (x *exchange) upstreamRequest() *upstream.Request {
	target := x.out.path
	if x.out.query != "" || x.req.bareQuery {
		target += "?" + x.out.query
	}
	x.sending = upstream.Request{
		Method: x.req.method,
		Target: target,
		Host:   x.req.host,
		Header: x.out.header,
		Body:   x.out.body,
		Length: x.out.length,
		Sent:   x.sending.Sent,
	}
	return &x.sending
}

// send sends the request upstream and the response down.
func (x *exchange) send(clients *clients) *outcome {
	client := clients.main
	if x.lock != nil {
		client = clients.lock
	}
	if x.protocol != "" {
		return x.upgrade(client, x.protocol)
	}
	do := client.Short
	if x.plan.route == stream {
		do = client.Stream
		defer x.lasting()()
	}
	if end := x.ask(do); end != nil {
		return end
	}
	defer func() { _ = x.reply.Body.Close() }()
	if end := x.responses.respond(&x.state, &x.reply); end != nil {
		return end
	}
	x.deliver(&x.reply)
	return nil
}

// lasting has the request go on until the pod shuts down, its policy ends it, or, if it is
// a watch, the pod drains. It must be released.
func (x *exchange) lasting() (release func()) {
	ctx, cancel := context.WithCancelCause(x.ctx)
	x.ctx, x.interrupt = ctx, func() { cancel(nil) }
	shutdown := context.AfterFunc(x.pod.done, func() { cancel(errShutdown) })
	drain := func() bool { return false }
	if x.req.info.Verb == "watch" {
		drain = context.AfterFunc(x.pod.draining, func() { x.retire(ctx, cancel) })
	}
	return func() {
		drain()
		shutdown()
		cancel(nil)
	}
}

// ask sends the request and waits for the head of the response.
func (x *exchange) ask(do func(context.Context, *upstream.Request) (upstream.Response, error)) *outcome {
	if x.gathers() {
		if err := x.gather(); err != nil {
			return failure(&upstream.BodyError{Err: err})
		}
	}
	write := x.plan.route == short && x.plan.key.Writes() && x.lock == nil
	if write {
		if !x.depart() {
			return restart
		}
		// Nothing of a connection that is closed leaves any more: Pod.Quiet.
		if gone := x.req.gone(); gone != nil {
			x.answered(nil, gone)
			return failure(gone)
		}
	}
	x.allowed.waits()
	var err error
	x.reply, err = do(x.ctx, x.upstreamRequest())
	if err == nil && x.version != "" {
		x.reply, err = x.refresh(x.reply, do)
	}
	x.answered(&x.reply, err)
	x.req.body.free()
	if err != nil {
		x.end = x.completion(nil, err)
		return failure(err)
	}
	if gone := x.req.gone(); write && gone != nil {
		_ = x.reply.Body.Close()
		return failure(gone)
	}
	x.received = time.Now()
	return nil
}

// refresh sends the client's own request if the apiserver does not have the earlier list.
func (x *exchange) refresh(resp upstream.Response, send func(context.Context, *upstream.Request) (upstream.Response, error)) (upstream.Response, error) {
	switch resp.Status {
	case http.StatusGone, http.StatusBadRequest, http.StatusUnprocessableEntity, http.StatusGatewayTimeout:
	default:
		return resp, nil
	}
	_ = resp.Body.Close()
	x.seen.Forget(x.version)
	x.out.query, x.version = x.fresh, ""
	return send(x.ctx, x.upstreamRequest())
}

// get sends a request of the proxy's own.
func (p *Pod) get(ctx context.Context, r *upstream.Request) (upstream.Response, error) {
	clients := p.clients.Load()
	if clients == nil {
		return upstream.Response{}, status.Unavailable(1, "the pod is about to end")
	}
	return clients.main.Short(ctx, r)
}
