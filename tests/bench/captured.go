package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"

	"github.com/ctrlmesh/ctrlmesh/agent/capture/netns"
)

// serviceAccount is where a pod has its credentials.
const serviceAccount = "/var/run/secrets/kubernetes.io/serviceaccount/"

// runCaptured measures requests from a pod on the mesh, through the redirection and the agent of its node,
// and from a pod beside it that is not on the mesh. `bench run` has made the objects.
func runCaptured(ctx context.Context, o options, _ string) error {
	subjects := make([]*subject, 2)
	for i, name := range []string{direct, ctrlmesh} {
		pid, agent, _ := strings.Cut(o.pods[i], ":")
		clients, err := clientsOf(pid)
		if err != nil {
			return fmt.Errorf("connecting from the pod of process %s: %w", pid, err)
		}
		s := &subject{name: name, clients: clients}
		if agent != "" {
			if s.pid, err = strconv.Atoi(agent); err != nil {
				return fmt.Errorf("process of the agent: %w", err)
			}
		}
		subjects[i] = s
	}
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

// clientsOf returns clients that connect to the apiserver as the pod of a process does: from its network
// namespace, with its credentials.
func clientsOf(pid string) ([]*client, error) {
	process := "/proc/" + pid
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

// processes of two pods, from a flag.
type processes [2]string

func (p *processes) String() string { return strings.Join(p[:], ",") }

func (p *processes) Set(text string) error {
	off, on, ok := strings.Cut(text, ",")
	if !ok {
		return errors.New("not two processes with a comma between")
	}
	*p = processes{off, on}
	return nil
}
