// Package upstream is one pod's way to the real apiserver.
//
// It connects to the addresses of the Cluster and to nothing else, and always
// verifies whom it reached. Requests travel over kept HTTP/1.1 connections without
// a goroutine between the caller and the socket, watches too; beyond a number of
// these they share an HTTP/2 connection, so that a thousand idle watches cost few
// sockets. Upgrades get a connection of their own.
package upstream
