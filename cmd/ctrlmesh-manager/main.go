// Command ctrlmesh-manager is the control plane of the mesh.
package main

import (
	"context"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"

	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"

	"github.com/ctrlmesh/ctrlmesh/manager"
)

// version is set by the linker.
var version string

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "ctrlmesh-manager:", err)
		os.Exit(1)
	}
}

func run() error {
	var (
		o       manager.Options
		level   slog.Level
		fs      = flag.CommandLine // controller-runtime adds --kubeconfig to it
		showing = fs.Bool("version", false, "print the version and exit")
	)
	fs.TextVar(&level, "log-level", slog.LevelInfo, "debug, info, warn or error")
	o.AddFlags(fs, os.Getenv)
	flag.Parse()
	if *showing {
		fmt.Println("ctrlmesh-manager", buildVersion())
		return nil
	}
	if flag.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q", flag.Arg(0))
	}

	// Below debug the Kubernetes client logs bodies of requests, tokens among them.
	o.Log = slog.New(slog.NewJSONHandler(os.Stderr, &slog.HandlerOptions{Level: max(level, slog.LevelDebug)}))
	slog.SetDefault(o.Log)
	klog.SetSlogLogger(o.Log)

	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop) // a second signal kills

	var err error
	if o.Config, err = ctrl.GetConfig(); err != nil {
		return err
	}
	o.Log.Info("starting", "version", buildVersion())
	return manager.Run(ctx, o)
}

func buildVersion() string {
	if version != "" {
		return version
	}
	if info, ok := debug.ReadBuildInfo(); ok {
		return info.Main.Version
	}
	return "unknown"
}
