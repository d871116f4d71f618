package main

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/agent/control"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

// fleet is the agents of all nodes.
type fleet struct {
	agents []*agent
	leader atomic.Pointer[string] // address, as the Service's endpoints have it

	received, sent atomic.Int64 // bytes

	mu      sync.Mutex
	pods    map[string]*times // by namespace; the names in them are uids
	synced  times             // when each node last had all its policies
	cluster times             // when each node last got the cluster
}

// times is when something last happened to each of a name.
type times struct {
	mu sync.Mutex
	at map[string]time.Time
}

func (t *times) note(name string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.at == nil {
		t.at = map[string]time.Time{}
	}
	t.at[name] = time.Now()
}

// after returns how many of the times are after another, and the last of them.
func (t *times) after(earlier time.Time) (n int, last time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, at := range t.at {
		if at.After(earlier) {
			n++
		}
		if at.After(last) {
			last = at
		}
	}
	return n, last
}

// of returns when the pods of a namespace got their last policies.
func (f *fleet) of(namespace string) *times {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.pods == nil {
		f.pods = map[string]*times{}
	}
	if f.pods[namespace] == nil {
		f.pods[namespace] = &times{}
	}
	return f.pods[namespace]
}

// start runs all agents until ctx ends.
func (f *fleet) start(ctx context.Context) {
	for _, a := range f.agents {
		go a.manager.Run(ctx, a)
	}
}

// agent is the agent of one node: the real connection to the manager, and a handler that applies
// everything at once.
type agent struct {
	fleet   *fleet
	node    string
	address net.IP
	manager *control.Manager

	mu       sync.Mutex
	versions map[string]string // by pod uid
	spaces   map[string]string // namespaces by pod uid
	rules    map[string][]string
}

// makeAgents makes an agent for each node, which runs once the fleet is started.
func (r *run) makeAgents(ctx context.Context) (err error) {
	if r.tokens, err = os.MkdirTemp("", "scale"); err != nil {
		return err
	}
	agents := make([]*agent, r.nodes)
	err = each(ctx, r.nodes, func(i int) error {
		token, err := r.token(ctx, i)
		if err != nil {
			return err
		}
		path := filepath.Join(r.tokens, r.node(i))
		if err := os.WriteFile(path, []byte(token), 0o600); err != nil {
			return err
		}
		a := &agent{fleet: &r.fleet, node: r.node(i), address: net.IPv4(198, 19, byte(i>>8), byte(i)), versions: map[string]string{}, spaces: map[string]string{}, rules: map[string][]string{}}
		a.manager = control.New(control.Config{
			Address: "manager", ServerName: kube.ManagerName + "." + kube.SystemNamespace + ".svc", Dial: a.dial,
			Roots: func(context.Context) (*x509.CertPool, error) { return r.roots, nil }, TokenFile: path,
			Node: a.node, Version: "scale", Captures: []string{"ebpf"}, Logger: slog.New(slog.DiscardHandler),
		})
		agents[i] = a
		return nil
	})
	if err != nil {
		return fmt.Errorf("making the agents' tokens: %w", err)
	}
	r.fleet.agents = agents
	go r.followLeader(ctx)
	return nil
}

func (r *run) managerRoots(ctx context.Context) (*x509.CertPool, error) {
	pool := x509.NewCertPool()
	return pool, kube.UntilWithin(ctx, patience, "the manager's CA", func(ctx context.Context) error {
		cm := &corev1.ConfigMap{}
		if err := r.Get(ctx, client.ObjectKey{Namespace: kube.SystemNamespace, Name: meshv1.ManagerCAConfigMap}, cm); err != nil {
			return err
		}
		if !pool.AppendCertsFromPEM([]byte(cm.Data[meshv1.ManagerCAKey])) {
			return errors.New("it has no certificate")
		}
		return nil
	})
}

// token returns a token as the kubelet asks for: of the agent's service account, bound to its pod.
func (r *run) token(ctx context.Context, i int) (string, error) {
	request, err := r.Clientset.CoreV1().ServiceAccounts(kube.SystemNamespace).CreateToken(ctx, kube.AgentName, &authenticationv1.TokenRequest{
		Spec: authenticationv1.TokenRequestSpec{
			Audiences:      []string{meshv1.Audience},
			BoundObjectRef: &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Pod", Name: r.agentPod(i).Name},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		return "", err
	}
	return request.Status.Token, nil
}

// followLeader reads where agents reach the manager, as a node's proxy does.
func (r *run) followLeader(ctx context.Context) {
	for ctx.Err() == nil {
		var slices discoveryv1.EndpointSliceList
		if err := r.List(ctx, &slices, client.InNamespace(kube.SystemNamespace), client.MatchingLabels{discoveryv1.LabelServiceName: kube.ManagerName}); err == nil {
			for _, s := range slices.Items {
				if len(s.Endpoints) > 0 && len(s.Endpoints[0].Addresses) > 0 {
					address := s.Endpoints[0].Addresses[0] + ":8443"
					r.fleet.leader.Store(&address)
				}
			}
		}
		_ = kube.Sleep(ctx, 200*time.Millisecond)
	}
}

func (a *agent) dial(ctx context.Context, _ string) (net.Conn, error) {
	leader := a.fleet.leader.Load()
	if leader == nil {
		return nil, errors.New("the Service has no endpoint")
	}
	conn, err := (&net.Dialer{LocalAddr: &net.TCPAddr{IP: a.address}}).DialContext(ctx, "tcp", *leader)
	if err != nil {
		return nil, err
	}
	return counted{conn, a.fleet}, nil
}

// counted counts the bytes of a connection.
type counted struct {
	net.Conn
	fleet *fleet
}

func (c counted) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.fleet.received.Add(int64(n))
	return n, err
}

func (c counted) Write(p []byte) (int, error) {
	n, err := c.Conn.Write(p)
	c.fleet.sent.Add(int64(n))
	return n, err
}

// SetCluster implements control.Handler.
func (a *agent) SetCluster(*meshv1.Cluster) error {
	a.fleet.cluster.note(a.node)
	return nil
}

// SetPolicy implements control.Handler.
func (a *agent) SetPolicy(p *meshv1.PodPolicy) (control.Applied, error) {
	var rules []string
	for _, b := range p.GetTraffic().GetBreakers() {
		for _, l := range b.GetRules() {
			rules = append(rules, l.GetKey())
		}
	}
	a.mu.Lock()
	a.versions[p.Uid], a.spaces[p.Uid], a.rules[p.Uid] = p.Version, p.Namespace, rules
	a.mu.Unlock()
	a.fleet.of(p.Namespace).note(p.Uid)
	a.manager.Report(&meshv1.PodReport{Uid: p.Uid, Capture: "ebpf", Version: p.Version})
	return control.Applied{Serial: p.Serial}, nil
}

// RemovePolicy implements control.Handler.
func (a *agent) RemovePolicy(uid string) (control.Applied, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.versions, uid)
	delete(a.spaces, uid)
	delete(a.rules, uid)
	return control.Applied{}, nil
}

// SetWebhooks implements control.Handler.
func (a *agent) SetWebhooks(*meshv1.Webhooks) {}

// Synced implements control.Handler.
func (a *agent) Synced(map[string]bool) {
	a.fleet.synced.note(a.node)
}

// Versions implements control.Handler.
func (a *agent) Versions() map[string]string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return maps.Clone(a.versions)
}

// Namespaces implements control.Handler.
func (a *agent) Namespaces() map[string]string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return maps.Clone(a.spaces)
}

// count reports the counts of all limits of an agent's pods.
func (a *agent) count(n uint64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for uid, keys := range a.rules {
		if len(keys) == 0 {
			continue
		}
		r := &meshv1.PodReport{Uid: uid, Capture: "ebpf", Version: a.versions[uid]}
		for _, key := range keys {
			r.Rules = append(r.Rules, &meshv1.RuleState{Key: key, Passed: n})
		}
		a.manager.Report(r)
	}
}
