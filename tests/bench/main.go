// Command bench measures the cost of a proxy between a client and the cluster's real
// apiserver: no proxy (direct), a plain httputil.ReverseProxy, HAProxy and ctrlmesh, in turns
// within one run. run.sh starts it in the network of the apiserver.
//
//	bench run       measures and prints the tables
//	bench filter    compares lists that ctrlmesh filters with those that it passes
//	bench captured  compares requests from a pod on the mesh with those from a pod off it
//	bench observe   compares requests of observed pods with those that nobody counts
//	bench reviews   compares admission reviews that ctrlmesh routes with those sent directly
//	bench plain     runs the ReverseProxy
//	bench mesh      runs ctrlmesh
//	bench router    runs ctrlmesh for the webhooks of two pods
//	bench webhook   runs a webhook
//	bench informer  runs a client in a pod: an informer of ConfigMaps
//	bench watcher   runs a client in a pod: one watch of ConfigMaps
//
// Every proxy is a separate process, so that its CPU time and memory can be measured. It
// inherits its listener as file descriptor 3.
package main

import (
	"context"
	"flag"
	"fmt"
	"net"
	"os"
	"os/signal"
	"runtime/pprof"
	"syscall"
)

func main() {
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "usage: bench run|filter|captured|observe|reviews|plain|mesh|router|webhook|informer|watcher [flags]")
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	commands := map[string]func(context.Context, options) error{
		"run": bounded(run), "filter": bounded(runFilter), "observe": bounded(runObserve), "reviews": inDirectory(runReviews), "captured": inDirectory(runCaptured),
		"plain": servePlain, "mesh": serveMesh, "router": serveRouter, "webhook": serveWebhook, "informer": runInformer, "watcher": runWatcher,
	}
	name, command := os.Args[1], commands[os.Args[1]]
	if command == nil {
		fmt.Fprintf(os.Stderr, "bench: no such command: %s\n", name)
		os.Exit(2)
	}
	var o options
	fs := flag.NewFlagSet("bench "+name, flag.ExitOnError)
	o.define(fs)
	_ = fs.Parse(os.Args[2:]) // ExitOnError
	if err := o.profiled(name, func() error { return command(ctx, o) }); err != nil {
		fmt.Fprintf(os.Stderr, "bench %s: %v\n", name, err)
		os.Exit(1)
	}
}

// options are the flags of every command; run passes its own to the proxies.
type options struct {
	api, ca, namespace string // the real apiserver and where the objects are
	cert               string // certificate and key that a proxy serves with
	owns               string // parts of a scope, for ctrlmesh
	policy             string // of the pod of ctrlmesh
	webhooks           string // host:port of two webhooks, for ctrlmesh
	off, on, agent     string // uids of a pod off the mesh, of one on it, and of its agent
	rows, subjects     string
	rounds             int
	haproxyUpstream    string // h2 or http/1.1
	profiles           string
}

func (o *options) define(fs *flag.FlagSet) {
	fs.StringVar(&o.api, "api", "", "host:port of the apiserver")
	fs.StringVar(&o.ca, "ca", "", "file with the apiserver's CA")
	fs.StringVar(&o.namespace, "namespace", os.Getenv("POD_NAMESPACE"), "namespace of the objects")
	fs.StringVar(&o.cert, "cert", "", "file with a proxy's certificate and key")
	fs.StringVar(&o.owns, "owns", "", "what ctrlmesh's shard owns, by namespace, as parts of a scope between semicolons; lists are filtered then")
	fs.StringVar(&o.policy, "policy", "member", "of the pod of ctrlmesh: member of a shard, rules (with 100 of them), passing (of a shard that divides nothing) or observed (of none)")
	fs.StringVar(&o.webhooks, "webhooks", "", "host:port of the webhooks of two pods, with a comma between, whose reviews ctrlmesh routes")
	fs.StringVar(&o.off, "off", "", "uid of a pod off the mesh")
	fs.StringVar(&o.on, "on", "", "uid of a pod on the mesh")
	fs.StringVar(&o.agent, "agent", "", "uid of its agent")
	fs.StringVar(&o.rows, "rows", "", "measure only rows that match this regular expression")
	fs.StringVar(&o.subjects, "subjects", "", "measure only subjects that match this regular expression")
	fs.IntVar(&o.rounds, "rounds", 18, "rounds; the result is their median")
	fs.StringVar(&o.haproxyUpstream, "haproxy-upstream", "http/1.1", "what HAProxy speaks to the apiserver: h2 or http/1.1")
	fs.StringVar(&o.profiles, "profiles", "", "existing directory for CPU profiles of the Go proxies")
}

// forProxy returns how to run this program as a proxy.
func (o *options) forProxy(command string) []string {
	return []string{"/proc/self/exe", command, "-api", o.api, "-ca", o.ca, "-namespace", o.namespace, "-cert", o.cert, "-profiles", o.profiles}
}

func (o *options) profiled(name string, f func() error) error {
	if o.profiles == "" || name == "run" || name == "filter" || name == "captured" || name == "observe" || name == "reviews" {
		return f()
	}
	out, err := os.Create(o.profiles + "/" + name + ".pprof")
	if err != nil {
		return err
	}
	defer func() { _ = out.Close() }()
	if err := pprof.StartCPUProfile(out); err != nil {
		return err
	}
	defer pprof.StopCPUProfile()
	return f()
}

// inherited returns the listener that a proxy was started with.
func inherited() (net.Listener, error) {
	f := os.NewFile(3, "listener")
	defer func() { _ = f.Close() }()
	return net.FileListener(f)
}
