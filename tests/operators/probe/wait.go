package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
)

// wait serves requests, for tests of port-forward, and logs them, for tests of logs.
func wait(ctx context.Context) error {
	name, err := os.Hostname()
	if err != nil {
		return err
	}
	server := &http.Server{Addr: ":8080", Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Println("asked for", r.URL.Path)
		_, _ = fmt.Fprintln(w, "this is", name)
	})}
	stop := context.AfterFunc(ctx, func() { _ = server.Close() })
	defer stop()
	if err := server.ListenAndServe(); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}
