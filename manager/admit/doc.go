// Package admit serves the manager's HTTP ports (webhooks, metrics and health) so
// that no client can exhaust the manager or keep others waiting.
//
// Pods can reach these ports. Every bound is per peer and in total, and the total is
// shared fairly: if it is reached, the peer that has the most loses first.
package admit
