//go:build !race

package proxy

// mostAllocated is for one GET.
const mostAllocated = 10.0
