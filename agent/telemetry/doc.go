// Package telemetry is how an agent shows its state to users: Events, metrics, and the
// endpoints of health and metrics.
package telemetry
