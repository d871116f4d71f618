// etcdbackup saves a snapshot of the cluster's etcd, and restores one into a data directory:
//
//	etcdbackup save FILE
//	etcdbackup restore FILE DIR
//
// A restored member counts revisions from far above those of the snapshot, and rejects older
// watches as compacted, like etcd's own tool with the options for Kubernetes. So clients list
// again instead of waiting for old revisions.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	save "go.etcd.io/etcd/client/v3/snapshot"
	restore "go.etcd.io/etcd/etcdutl/v3/snapshot"
	"go.uber.org/zap"
)

const (
	// The member's name and addresses, as lib.sh starts it.
	name    = "e"
	client  = "http://127.0.0.1:2379"
	peer    = "http://127.0.0.1:2380"
	bump    = 1_000_000_000
	timeout = time.Minute
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "etcdbackup:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	switch {
	case len(args) == 2 && args[0] == "save":
		ctx, cancel := context.WithTimeout(context.Background(), timeout)
		defer cancel()
		_, err := save.SaveWithVersion(ctx, zap.NewNop(), clientv3.Config{Endpoints: []string{client}, DialTimeout: timeout}, args[1])
		return err
	case len(args) == 3 && args[0] == "restore":
		return restore.NewV3(zap.NewNop()).Restore(restore.RestoreConfig{
			SnapshotPath: args[1], OutputDataDir: args[2], Name: name,
			PeerURLs: []string{peer}, InitialCluster: name + "=" + peer, InitialClusterToken: "restored",
			RevisionBump: bump, MarkCompacted: true,
		})
	}
	return errors.New("usage: etcdbackup save FILE | restore FILE DIR")
}
