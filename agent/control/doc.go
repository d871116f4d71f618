// Package control is the agent's side of the stream to the manager: it receives
// policies, acknowledges them once they have taken effect, and sends reports.
package control
