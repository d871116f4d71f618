// Package upstream connects one pod to the apiserver.
//
// It connects to the addresses of the Cluster only, and always verifies the server.
// Requests, watches included, are sent on kept HTTP/1.1 connections, without a goroutine
// between the caller and the socket. Above a number of streams, further ones share an
// HTTP/2 connection, so that a thousand idle watches need few sockets. Each upgrade has a
// connection of its own.
package upstream
