package main

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"time"

	"github.com/ctrlmesh/ctrlmesh/agent/capture/netns"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
	"github.com/ctrlmesh/ctrlmesh/tests/stats"
)

// serviceAccount is where a pod has its credentials.
const serviceAccount = "/var/run/secrets/kubernetes.io/serviceaccount/"

// runCaptured measures requests from a pod on the mesh, through the redirection and the agent of its node,
// and from a pod of the same node that is not on the mesh. `bench run` has made the objects.
func runCaptured(ctx context.Context, o options, _ string) error {
	agent, err := stats.ProcessOf(o.agent, stats.Runs("ctrlmesh-agent"))
	if err != nil {
		return fmt.Errorf("looking for the agent: %w", err)
	}
	off, err := clientsOf(o.off)
	if err != nil {
		return fmt.Errorf("connecting from the pod off the mesh: %w", err)
	}
	on, err := clientsOf(o.on)
	if err != nil {
		return fmt.Errorf("connecting from the pod on the mesh: %w", err)
	}
	if err := enrolled(ctx, on[0]); err != nil {
		return err
	}
	subjects := []*subject{{name: direct, clients: off}, {name: ctrlmesh, clients: on, pid: agent}}
	wanted, err := o.wanted(rows(o.namespace, subjects[0]))
	if err != nil || len(wanted) == 0 {
		return err
	}
	results, err := measure(ctx, o.rounds, wanted, subjects)
	if err != nil {
		return err
	}
	fmt.Println("\nFrom pods, on the mesh and off it:")
	report(os.Stdout, wanted, subjects, results)
	return nil
}

// enrolled waits until requests from a new pod on the mesh are no longer answered with 503, for want of a policy.
func enrolled(ctx context.Context, c *client) error {
	return kube.UntilWithin(ctx, 30*time.Second, "the policy of the pod on the mesh", func(ctx context.Context) error {
		_, err := c.do(ctx, request{path: "/version", accept: "application/json"})
		return err
	})
}

// clientsOf returns clients that connect to the apiserver as the pod with uid does: from its network namespace,
// with its credentials. The calling process moves to the pod's control group, because redirection is for processes
// below that of the node.
func clientsOf(uid string) ([]*client, error) {
	pid, err := stats.ProcessOf(uid, func(dir string) bool { // of a container: the sandbox has no credentials
		_, err := os.Stat(dir + "/root" + serviceAccount + "token")
		return err == nil
	})
	if err != nil {
		return nil, err
	}
	if err := stats.Join(pid); err != nil {
		return nil, err
	}
	process := fmt.Sprintf("/proc/%d", pid)
	token, err := os.ReadFile(process + "/root" + serviceAccount + "token")
	if err != nil {
		return nil, err
	}
	ca, err := os.ReadFile(process + "/root" + serviceAccount + "ca.crt")
	if err != nil {
		return nil, err
	}
	environment, err := os.ReadFile(process + "/environ")
	if err != nil {
		return nil, err
	}
	host, port := variable(environment, "KUBERNETES_SERVICE_HOST"), variable(environment, "KUBERNETES_SERVICE_PORT")
	network, err := os.Open(process + "/ns/net")
	if err != nil {
		return nil, err
	}
	return newClientsBy(func(_ context.Context, kind, addr string) (conn net.Conn, err error) {
		err = netns.Do(network, func() (err error) {
			conn, err = net.Dial(kind, addr) // on this thread: addr has no name to look up
			return err
		})
		return conn, err
	}, net.JoinHostPort(host, port), ca, string(token)), nil
}

// variable returns the value of a variable of an environment; "" if it is not set.
func variable(environment []byte, name string) string {
	for entry := range bytes.SplitSeq(environment, []byte{0}) {
		if value, ok := bytes.CutPrefix(entry, []byte(name+"=")); ok {
			return string(value)
		}
	}
	return ""
}
