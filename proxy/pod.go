package proxy

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/bounds"
	"github.com/ctrlmesh/ctrlmesh/proxy/egress"
	"github.com/ctrlmesh/ctrlmesh/proxy/fault"
	"github.com/ctrlmesh/ctrlmesh/proxy/limit"
	"github.com/ctrlmesh/ctrlmesh/proxy/lock"
	"github.com/ctrlmesh/ctrlmesh/proxy/metrics"
	"github.com/ctrlmesh/ctrlmesh/proxy/pipeline"
	"github.com/ctrlmesh/ctrlmesh/proxy/pipeline/stages"
	"github.com/ctrlmesh/ctrlmesh/proxy/relist"
	"github.com/ctrlmesh/ctrlmesh/proxy/review"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/downstream"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/upstream"
)

var (
	errShutdown = errors.New("the proxy of this pod shuts down")
	errDraining = errors.New("another proxy takes over")
	// errUnanswerable ends writes of a pod that has lost its network.
	errUnanswerable = errors.New("the network of this pod is gone")
)

// PodInfo describes a pod before its first policy.
type PodInfo = stages.PodInfo

// DialFunc connects from a pod's network namespace. addr is a literal IP and port.
type DialFunc func(ctx context.Context, network, addr string) (net.Conn, error)

// Pod is one captured pod. Its methods are safe for concurrent use.
type Pod struct {
	env    stages.Env
	server *Server
	dial   DialFunc
	http   *downstream.Server

	lifetime  lifetime
	accepting accepting
	budgets   pipeline.Budgets
	inForce   inForce

	egress  *egress.Server
	reviews *review.Server
	notices notices
}

// lifetime is how a pod ends, in steps.
type lifetime struct {
	// done ends when long-running answers are to end at once.
	done context.Context
	end  context.CancelCauseFunc
	// life ends when nothing of the pod goes on any more but writes at the apiserver.
	life context.Context
	die  context.CancelFunc
	// writing ends when those are over as well, or when no answer can arrive any more;
	// the cause is errUnanswerable then.
	writing    context.Context
	endWriting context.CancelCauseFunc
}

func newLifetime() (l lifetime) {
	l.done, l.end = context.WithCancelCause(context.Background())
	l.life, l.die = context.WithCancel(context.Background())
	l.writing, l.endWriting = context.WithCancelCause(context.Background())
	return l
}

// accepting is what a pod has open towards its clients.
type accepting struct {
	conns   *downstream.Conns
	tunnels tunnels
	dropped *rate.Limiter // of requests
	// distrust is when a client last did not trust the mesh's CA, in Unix nanoseconds.
	distrust atomic.Int64
}

// inForce is the policy that applies to a pod, and the requests in progress under it.
type inForce struct {
	clients  atomic.Pointer[clients]
	settled  atomic.Pointer[stages.Policy] // the last that has settled
	changing sync.Mutex                    // guards the replacement of the policy
	connects connects
}

// clients are the pod's connections to the apiserver. The lock has its own, so that a
// renewal waits for nothing else.
type clients struct {
	main, lock *upstream.Client
	cluster    *upstream.Cluster
}

func newPod(s *Server, info PodInfo, dial DialFunc) *Pod {
	p := &Pod{
		env: stages.Env{
			Info: info, ID: info.Namespace + "/" + info.Name,
			Observations: stages.Observations{LockWrites: lock.NewWrites()},
			Rules:        stages.Rules{Limits: limit.NewStore(), Faults: fault.NewStore(info.UID)},
			Ledger:       relist.NewLedger(), Metrics: s.metrics,
			Unassigned: s.metrics.Workloads.Acquire(info.Namespace, "", ""),
			Leaf:       func() (*tls.Certificate, error) { return s.config.Leaf() },
		},
		server: s, dial: dial,
		lifetime: newLifetime(),
		inForce:  inForce{connects: connects{open: map[*pipeline.State]*connect{}}},
		budgets: pipeline.Budgets{
			Held:     bounds.Account{Pool: s.held, Own: pipeline.OwnHeld},
			Long:     bounds.Account{Pool: s.long, Own: pipeline.OwnLong},
			MaxLong:  s.config.WatchMemory,
			Lock:     bounds.Account{Pool: s.held, Own: pipeline.OwnLock},
			Filtered: bounds.Account{Pool: s.filtered, Own: pipeline.OwnFiltered},
		},
	}
	p.budgets.Pod, p.budgets.Bound = p.env.ID, p.bound
	p.accepting.conns, p.accepting.dropped = s.conns.Conns(p.bound), rate.NewLimiter(abandonedRate, abandonedBurst)
	p.accepting.conns.Distrusted = p.distrusted
	p.env.Draining = p.accepting.conns.Draining
	p.env.Notify, p.env.Get, p.env.NoResponse, p.env.Enter = p.notify, p.get, p.noResponse, p.enter
	context.AfterFunc(p.lifetime.life, func() { time.AfterFunc(p.unseen(), func() { p.lifetime.endWriting(nil) }) })
	p.http = p.newHTTP()
	p.egress = newEgress(p)
	p.reviews = newReviews(p)
	return p
}

// Applied is what applies to a pod's requests after a policy was applied.
type Applied struct {
	// Settled is closed when no write that earlier policies allowed can take effect any
	// more; of a later policy never before that of an earlier. Nil: none can now.
	Settled <-chan struct{}
	// Rules are the traffic rules in force: those of the policy, or the last valid ones if
	// these are invalid; nil while they are unknown.
	Rules *meshv1.Traffic
	// Problem is why Rules are not those of the policy; nil if they are.
	Problem error
}

// Apply puts a policy in force for every request that starts after it returns. It ends
// watches that the policy would have narrowed otherwise. Each cache gets the difference with
// its next watch, or 410 so that it lists, unless the policy keeps caches. After the first
// policy all list: it is unknown what they were filled under. On an error the last valid
// policy stays.
// Invalid traffic rules are not an error: Applied has the rules that apply. A refusal
// without Traffic leaves unknown rules unknown.
//
// Writes that earlier policies allowed go on.
func (p *Pod) Apply(m *meshv1.PodPolicy) (Applied, error) {
	return p.applySince(m, time.Now())
}

// Restore is Apply for a first policy that an earlier proxy of this pod had in force since
// the given time, zero for long ago: caches resume. If it came just before that proxy
// ended, they may not have been made to list, and are now; writes of what the pod owns are
// refused meanwhile. After another policy it is the same as Apply.
func (p *Pod) Restore(m *meshv1.PodPolicy, since time.Time) error {
	p.env.Ledger.Restored(since)
	_, err := p.applySince(m, since)
	return err
}

func (p *Pod) applySince(m *meshv1.PodPolicy, since time.Time) (Applied, error) {
	next, err := stages.Compile(&p.env, m)
	if err != nil {
		return Applied{}, err
	}
	p.change(next, since)
	p.egress.Changed() // after the change: to decide on all open connections takes time
	return Applied{Settled: next.Succession.Settled, Rules: next.Traffic.Source, Problem: next.Traffic.Problem}, nil
}

// change puts a policy in force.
func (p *Pod) change(next *stages.Policy, since time.Time) {
	p.inForce.changing.Lock()
	defer p.inForce.changing.Unlock()
	old := p.env.Policy.Load()
	next.Inherit(old)
	next.Acquire()
	if old == nil || old.Redivides(next) {
		p.env.Observations.Activity.Reset(time.Now())
	}
	next.Enforce() // before requests find it: its rules may not have imported their counts yet
	p.env.Ledger.Change(next, since, func() { p.env.Policy.Store(next) })
	if p.env.Info.Journal != nil {
		p.env.Info.Journal.Unseen(p.unseen())
	}
	old.Release()
	p.inForce.connects.cut(next)
	if !next.Passthrough {
		p.http.CloseTunnels() // a policy that restricts the pod must see all its requests
	}
	p.succeed(old, next)
}

// Version of the last policy that settled; "" before the first.
func (p *Pod) Version() string {
	if pol := p.inForce.settled.Load(); pol != nil {
		return pol.Message.GetVersion()
	}
	return ""
}

// Done is closed when nothing of the pod goes on any more.
func (p *Pod) Done() <-chan struct{} { return p.lifetime.life.Done() }

// Quiet waits until no request on a connection that is open now can take effect any more.
// The connections must end by themselves: it is for a pod whose processes have exited.
func (p *Pod) Quiet(ctx context.Context) error {
	for _, c := range p.accepting.conns.List() {
		if c.Tunnel {
			continue
		}
		select {
		case <-c.Life.Done():
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	settled, err := p.resettle()
	if err != nil {
		return err
	}
	select {
	case <-settled:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// resettle replaces the policy in force by itself. settled is closed when no write that it
// allowed before can take effect any more.
func (p *Pod) resettle() (settled <-chan struct{}, err error) {
	p.inForce.changing.Lock()
	defer p.inForce.changing.Unlock()
	old := p.env.Policy.Load()
	if old == nil {
		return nil, errors.New("the pod has no policy")
	}
	next, err := stages.Compile(&p.env, old.Message)
	if err != nil {
		return nil, err
	}
	next.Inherit(old)
	next.Acquire()
	p.env.Ledger.Renew(next, func() { p.env.Policy.Store(next) })
	old.Release()
	p.succeed(old, next)
	return next.Succession.Settled, nil
}

// Serve accepts connections on l, which it closes. It returns nil after Drain or
// Shutdown began, and may be called for several listeners.
func (p *Pod) Serve(l net.Listener) error { return p.http.Serve(l) }

func (p *Pod) setCluster(c *upstream.Cluster) {
	var next *clients
	if c != nil {
		dial := upstream.Dial(p.dial)
		next = &clients{main: upstream.NewClient(c, dial), lock: upstream.NewClient(c, dial), cluster: c}
	}
	if old := p.inForce.clients.Swap(next); old != nil {
		old.main.Close()
		old.lock.Close()
	}
}

// stopCounting releases the pod's series. A policy may still come, by a caller that waits
// for the pod to be quiet.
func (p *Pod) stopCounting() {
	p.inForce.changing.Lock()
	defer p.inForce.changing.Unlock()
	if p.env.Removed {
		return
	}
	p.env.Policy.Load().Release()
	p.server.metrics.Workloads.Release(p.env.Unassigned)
	p.env.Removed = true
}

// workload returns the series that the pod counts in.
func (p *Pod) workload() *metrics.Workload {
	if pol := p.env.Policy.Load(); pol != nil {
		return pol.Tally.Metrics
	}
	return p.env.Unassigned
}
