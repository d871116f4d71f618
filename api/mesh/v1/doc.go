// Package meshv1 is the protocol between the manager and the agents.
package meshv1
