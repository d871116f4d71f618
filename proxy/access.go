package proxy

import (
	"context"
	"log/slog"
)

// account counts and logs the request, once: when it has ended, or when its response
// begins if that may last for hours.
func (x *exchange) account() {
	if x.accounted {
		return
	}
	x.accounted = true
	x.reportResult(x.code, x.received)
	if x.plan != nil {
		x.plan.meters.Count(x.code)
	}
	if x.debug {
		x.log()
	}
}

// accessAttrs returns the attributes of the request in an access line: no header except
// the audit id, no query and no body.
func (x *exchange) accessAttrs() []slog.Attr {
	attrs := make([]slog.Attr, 0, 15)
	attrs = append(attrs,
		slog.String("audit_id", bounded(x.out.header.get(auditHeader))),
		slog.String("pod", x.pod.id),
		slog.String("uid", x.pod.info.UID),
	)
	if x.policy != nil {
		attrs = append(attrs, slog.String("shard", x.policy.shard))
	}
	if i := x.req.info; i != nil {
		attrs = append(attrs,
			slog.String("verb", i.Verb),
			slog.String("resource", i.Resource),
			slog.String("subresource", i.Subresource),
			slog.String("namespace", i.Namespace),
			slog.String("name", i.Name),
		)
	}
	return attrs
}

// log writes the access line.
func (x *exchange) log() {
	attrs := append(x.accessAttrs(),
		slog.Int("code", x.code),
		slog.Duration("added", x.added),
		slog.Int64("bytes", x.bytes),
	)
	if x.would != "" {
		attrs = append(attrs, slog.String("dry_run", x.would))
	}
	if x.allowed.refusedBy != "" {
		attrs = append(attrs, slog.String("limited_by", x.allowed.refusedBy))
	}
	if x.faults != nil {
		attrs = append(attrs, slog.Any("faults", x.faults.Rules))
		if x.skipped != "" {
			attrs = append(attrs, slog.String("unharmed", x.skipped))
		}
	}
	x.pod.server.log.LogAttrs(context.Background(), slog.LevelDebug, "request", attrs...)
}
