// Package state keeps the last policies and pods on disk, so that an agent that starts
// while no manager answers serves as last configured.
package state
