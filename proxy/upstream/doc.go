// Package upstream is one pod's way to the real apiserver.
//
// It connects to the addresses of the Cluster and to nothing else, and always
// verifies whom it reached. Short requests travel over kept HTTP/1.1
// connections without a goroutine between the caller and the socket; streams
// share one HTTP/2 connection, so that a hundred idle watches cost one socket;
// upgrades get a connection of their own.
package upstream
