// Package v2 defines the hub version of Paper, the kind that the test operator reviewer
// reviews: the one that is stored, and that its admission webhooks receive.
package v2
