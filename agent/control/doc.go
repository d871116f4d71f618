// Package control is the agent's side of the stream to the manager: it receives
// policies, acknowledges them once they have settled, and sends reports.
package control
