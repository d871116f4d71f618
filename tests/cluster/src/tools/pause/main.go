// pause runs in a pod's sandbox: it reaps zombies and sleeps until it is signalled.
package main

import (
	"os"
	"os/signal"
	"syscall"
)

func main() {
	c := make(chan os.Signal, 16)
	signal.Notify(c, syscall.SIGINT, syscall.SIGTERM, syscall.SIGCHLD)
	for s := range c {
		if s == syscall.SIGCHLD {
			for {
				if p, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil); p <= 0 || err != nil {
					break
				}
			}
			continue
		}
		os.Exit(0)
	}
}
