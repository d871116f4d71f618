// Package program runs the command lines of the agent and the manager: signals,
// the log, the version and the exit code.
package program

import (
	"context"
	"log/slog"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/klog/v2"
)

// version is set by the linker.
var version string

// Version returns the version of this program.
func Version() string {
	if version != "" {
		return version
	}
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "unknown"
}

// Main runs a command until it returns or a signal stops it, and exits with 1 if it
// fails. A second signal kills the program.
func Main(c *cobra.Command) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)
	// The other end of the log belongs to the container runtime, which may restart.
	signal.Ignore(syscall.SIGPIPE)
	c.Version = Version()
	c.SilenceUsage = true
	c.CompletionOptions.DisableDefaultCmd = true
	c.SetErrPrefix(c.Name() + ":")
	if c.ExecuteContext(ctx) != nil {
		os.Exit(1)
	}
}

// LogLevel adds the flag --log-level and returns its value.
func LogLevel(fs *pflag.FlagSet) *slog.Level {
	level := new(slog.Level)
	fs.TextVar(level, "log-level", slog.LevelInfo, "debug, info, warn or error; debug writes a line for each request")
	return level
}

// NewLogger returns a logger of JSON lines on standard error. The libraries of this
// program use it too. No level is below debug: the Kubernetes client would log bodies of
// requests there, tokens among them.
func NewLogger(level slog.Level) *slog.Logger {
	log := slog.New(slog.NewJSONHandler(os.Stderr, &slog.HandlerOptions{Level: max(level, slog.LevelDebug)}))
	slog.SetDefault(log)
	klog.SetSlogLogger(log)
	return log
}
