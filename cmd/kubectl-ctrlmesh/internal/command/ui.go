package command

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/snapshot"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/ui"
)

func (e *environment) uiCommand() *cobra.Command {
	c := &cobra.Command{
		Use: "ui", Short: "Show the mesh in a browser", Args: cobra.NoArgs,
		Long:    "Serve pages that show the mesh, on 127.0.0.1 alone, with your own permissions. They follow the cluster until the command is interrupted, and change nothing. With -n they show one namespace.",
		Example: "  kubectl ctrlmesh ui\n  kubectl ctrlmesh ui -n operator-demo --port 8080",
	}
	port := c.Flags().Uint16("port", 0, "port to listen on; a free one by default")
	c.RunE = e.connected(func(ctx context.Context, r snapshot.Reader, _ string, _ []string) error {
		listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(int(*port))))
		if err != nil {
			return fmt.Errorf("listening: %w: name another port by --port", err)
		}
		address := listener.Addr().String()
		_, actual, _ := net.SplitHostPort(address) // a listener has a port
		pages := &ui.Server{Reader: r, Namespace: *e.flags.Namespace, Hosts: []string{address, "localhost:" + actual}, Token: rand.Text(), Poll: e.poll}
		fmt.Fprintf(e.Out, "open http://%s%s in a browser; Ctrl-C ends it\n", address, pages.Root())
		return serve(ctx, listener, pages.Handler())
	})
	return c
}

// serve serves a handler until the context ends.
func serve(ctx context.Context, listener net.Listener, handler http.Handler) error {
	server := &http.Server{Handler: handler, ReadHeaderTimeout: 10 * time.Second, BaseContext: func(net.Listener) context.Context { return ctx }}
	stop := context.AfterFunc(ctx, func() { _ = server.Close() }) // nothing is left to do
	defer stop()
	if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serving: %w", err)
	}
	return nil
}
