//go:build race

package proxy

// mostAllocated is higher than without the race detector, with which pools drop at random what they are given.
const mostAllocated = 22.0
