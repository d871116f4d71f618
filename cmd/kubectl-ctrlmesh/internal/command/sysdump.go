package command

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/snapshot"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/sysdump"
)

func (e *environment) sysdumpCommand() *cobra.Command {
	c := &cobra.Command{
		Use: "sysdump", Short: "Collect what explains the state of the mesh into an archive", Args: cobra.NoArgs,
		Long:    "Write a zip archive with the objects of the mesh and its users, the reports of status, check and version, and the logs of the manager and the agents. It has no Secrets, no environment variables and no arguments of users' pods.",
		Example: "  kubectl ctrlmesh sysdump\n  kubectl ctrlmesh sysdump --since 2h --file /tmp/mesh.zip",
	}
	file := c.Flags().String("file", "", "archive to write, which must not exist (default ctrlmesh-sysdump-TIME.zip)")
	since := c.Flags().Duration("since", 24*time.Hour, "how far back logs go")
	c.RunE = func(c *cobra.Command, _ []string) error {
		if *since <= 0 {
			return fmt.Errorf("invalid --since %s: it must be positive", *since)
		}
		r, _, err := e.connect()
		if err != nil {
			return err
		}
		name := *file
		if name == "" {
			name = "ctrlmesh-sysdump-" + r.Now().UTC().Format("20060102T150405Z") + ".zip"
		}
		out, err := e.dump(c.Context(), r, name, *since)
		if err != nil {
			return err
		}
		if err := e.print(out, false); err != nil {
			return err
		}
		if n := len(out.Missing); n > 0 {
			return fmt.Errorf("%d parts could not be read, see incomplete.txt in the archive: you may lack permissions", n)
		}
		return nil
	}
	return c
}

// dump writes an archive to a new file. It leaves none behind if it fails.
func (e *environment) dump(ctx context.Context, r snapshot.Reader, name string, since time.Duration) (sysdump.Archive, error) {
	file, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if errors.Is(err, os.ErrExist) {
		return sysdump.Archive{}, fmt.Errorf("%s exists: name another by --file", name)
	}
	if err != nil {
		return sysdump.Archive{}, fmt.Errorf("creating the archive: %w: name another by --file", err)
	}
	collector := sysdump.Collector{Reader: r, Version: e.version, Since: since}
	out, err := collector.Write(ctx, file)
	if err = errors.Join(err, file.Close()); err != nil {
		return sysdump.Archive{}, errors.Join(fmt.Errorf("collecting the state of the mesh: %w", err), os.Remove(name))
	}
	return out, nil
}
