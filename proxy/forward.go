package proxy

import (
	"context"
	"net/http"
	"time"

	"github.com/ctrlmesh/ctrlmesh/proxy/pipeline"
	"github.com/ctrlmesh/ctrlmesh/proxy/status"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/upstream"
)

// upstreamRequest returns the request as the stages have edited it.
func (x *exchange) upstreamRequest() *upstream.Request {
	target := x.Out.Path
	if x.Out.Query != "" || x.Req.BareQuery {
		target += "?" + x.Out.Query
	}
	x.sending = upstream.Request{
		Method: x.Req.Method,
		Target: target,
		Host:   x.Req.Host,
		Header: x.Out.Header,
		Body:   x.Out.Body,
		Length: x.Out.Length,
		Sent:   x.sending.Sent,
	}
	return &x.sending
}

// send sends the request upstream and the response down.
func (x *exchange) send(clients *clients) *pipeline.Outcome {
	client := clients.main
	if x.Lock.Named != nil {
		client = clients.lock
	}
	if x.Protocol != "" {
		return x.upgrade(client, x.Protocol)
	}
	do := client.Short
	if x.Plan.Delivery == pipeline.DeliveryStream {
		do = client.Stream
		defer x.lasting()()
	}
	if end := x.ask(do); end != nil {
		return end
	}
	defer func() { _ = x.reply.Body.Close() }()
	if end := x.Responses.Respond(&x.State, &x.reply); end != nil {
		return end
	}
	x.deliver(&x.reply)
	return nil
}

// lasting has the request go on until the pod shuts down, its policy ends it, or, if it is
// a watch, the pod drains. It must be released.
func (x *exchange) lasting() (release func()) {
	ctx, cancel := context.WithCancelCause(x.Ctx)
	x.Ctx, x.Interrupt = ctx, func() { cancel(nil) }
	shutdown := context.AfterFunc(x.pod.lifetime.done, func() { cancel(errShutdown) })
	drain := func() bool { return false }
	if x.Req.Info.Verb == "watch" {
		drain = context.AfterFunc(x.pod.env.Draining, func() { x.retire(ctx, cancel) })
	}
	return func() {
		drain()
		shutdown()
		cancel(nil)
	}
}

// ask sends the request and waits for the head of the response.
func (x *exchange) ask(do func(context.Context, *upstream.Request) (upstream.Response, error)) *pipeline.Outcome {
	if x.Gathers() {
		if err := x.Gather(); err != nil {
			return pipeline.Failure(&upstream.BodyError{Err: err})
		}
	}
	// Writes to the lock that name its version are not counted: no handover waits for them, the
	// version orders them.
	write := x.Plan.Delivery == pipeline.DeliveryShort && x.Plan.Key.Writes() && (x.Lock.Named == nil || x.Lock.AnyVersion)
	if write {
		if !x.depart() {
			return pipeline.Restart
		}
		// Nothing of a connection that is closed leaves any more: Pod.Quiet.
		if gone := x.Req.Gone(); gone != nil {
			x.answered(nil, gone)
			return pipeline.Failure(gone)
		}
	}
	x.Allowed.Waits()
	var err error
	x.reply, err = do(x.Ctx, x.upstreamRequest())
	if err == nil && x.Stale.Version != "" {
		x.reply, err = x.refresh(x.reply, do)
	}
	x.answered(&x.reply, err)
	x.Req.Body.Free()
	if err != nil {
		x.end = x.completion(nil, err)
		return pipeline.Failure(err)
	}
	if write {
		x.noteWritten()
	}
	if gone := x.Req.Gone(); write && gone != nil {
		_ = x.reply.Body.Close()
		return pipeline.Failure(gone)
	}
	x.received = time.Now()
	return nil
}

// noteWritten counts a write that the apiserver answered with success.
func (x *exchange) noteWritten() {
	if a := x.Plan.Activity; a != nil && x.reply.Status/100 == 2 {
		a.Written(&x.State)
	}
}

// refresh sends the client's own request if the apiserver does not have the earlier list.
func (x *exchange) refresh(resp upstream.Response, send func(context.Context, *upstream.Request) (upstream.Response, error)) (upstream.Response, error) {
	switch resp.Status {
	case http.StatusGone, http.StatusBadRequest, http.StatusUnprocessableEntity, http.StatusGatewayTimeout:
	default:
		return resp, nil
	}
	_ = resp.Body.Close()
	x.Stale.Seen.Forget(x.Stale.Version)
	x.Out.Query, x.Stale.Version = x.Stale.Fresh, ""
	return send(x.Ctx, x.upstreamRequest())
}

// get sends a request of the proxy's own.
func (p *Pod) get(ctx context.Context, r *upstream.Request) (upstream.Response, error) {
	clients := p.inForce.clients.Load()
	if clients == nil {
		return upstream.Response{}, status.Unavailable(1, "the pod is about to end")
	}
	return clients.main.Short(ctx, r)
}
