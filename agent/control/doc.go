// Package policy brings the manager's word to the agent: the stream that
// carries it, and the directory that keeps the last of it, so that an agent
// that starts while no manager answers serves as it was last told.
package policy
