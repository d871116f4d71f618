// Candidate takes part in a leader election, as operators did that were built with client-go
// before 0.24: its lock is a ConfigMap or Endpoints, alone or with a Lease. It does nothing else,
// and does not use the mesh.
package main

import (
	"context"
	"flag"
	"log"
	"os"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
)

func main() {
	kind := flag.String("lock-kind", resourcelock.ConfigMapsLeasesResourceLock, "configmaps, endpoints, configmapsleases or endpointsleases")
	name := flag.String("lock", "candidate", "name of the lock")
	flag.Parse()
	config, err := rest.InClusterConfig()
	if err != nil {
		log.Fatal(err)
	}
	identity, err := os.Hostname()
	if err != nil {
		log.Fatal(err)
	}
	lock, err := resourcelock.NewFromKubeconfig(*kind, os.Getenv("POD_NAMESPACE"), *name,
		resourcelock.ResourceLockConfig{Identity: identity + "_" + time.Now().Format(time.RFC3339Nano)}, config, 10*time.Second)
	if err != nil {
		log.Fatal(err)
	}
	leaderelection.RunOrDie(context.Background(), leaderelection.LeaderElectionConfig{
		Lock: lock, LeaseDuration: 15 * time.Second, RenewDeadline: 10 * time.Second, RetryPeriod: 2 * time.Second,
		Callbacks: leaderelection.LeaderCallbacks{
			OnStartedLeading: func(context.Context) { log.Print("leading") },
			OnStoppedLeading: func() { log.Fatal("not leading any more") },
		},
	})
}
