package kube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"time"

	eventsv1 "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
)

const (
	// maxPending bounds the Events that wait for the apiserver.
	maxPending = 64
	// eventRetry is the time between attempts while the apiserver does not answer.
	eventRetry = 10 * time.Second
	// eventTimeout is of one request.
	eventTimeout = 10 * time.Second
)

// Events writes Events. It is safe for concurrent use.
type Events struct {
	client  *Client
	logger  *slog.Logger
	pending chan *eventsv1.Event
}

// Events returns a writer of Events, which Run writes.
func (c *Client) Events(logger *slog.Logger) *Events {
	return &Events{client: c, logger: logger, pending: make(chan *eventsv1.Event, maxPending)}
}

// Write queues an Event. It never blocks: without room, the Event is dropped.
func (e *Events) Write(event *eventsv1.Event) {
	select {
	case e.pending <- event:
	default:
	}
}

// Run writes Events until ctx ends.
func (e *Events) Run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case event := <-e.pending:
			e.write(ctx, event)
		}
	}
}

// write writes an Event, and waits for an apiserver that does not answer.
func (e *Events) write(ctx context.Context, event *eventsv1.Event) {
	err := e.attempt(ctx, event)
	for refused := (apierrors.APIStatus)(nil); err != nil && !errors.As(err, &refused); err = e.attempt(ctx, event) {
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait.Jitter(eventRetry, 0.25)):
		}
	}
	if err != nil {
		e.logger.Warn("the apiserver refused an Event", "reason", event.Reason, "namespace", event.Regarding.Namespace, "name", event.Regarding.Name, "error", err)
	}
}

// attempt creates an Event, or sets the series of one that exists.
func (e *Events) attempt(ctx context.Context, event *eventsv1.Event) error {
	ctx, cancel := context.WithTimeout(ctx, eventTimeout)
	defer cancel()
	if event.Series != nil {
		patch, err := json.Marshal(map[string]any{"series": event.Series})
		if err != nil {
			return fmt.Errorf("encoding the series of an Event: %w", err)
		}
		err = e.client.events.Patch(types.MergePatchType).Namespace(event.Namespace).Resource("events").Name(event.Name).Body(patch).Do(ctx).Error()
		if !apierrors.IsNotFound(err) {
			return err
		}
	}
	err := e.client.events.Post().Namespace(event.Namespace).Resource("events").Body(event).Do(ctx).Error()
	if apierrors.IsAlreadyExists(err) {
		return nil // written by an attempt whose answer was lost
	}
	return err
}
