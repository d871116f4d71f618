package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"path/filepath"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

const (
	allowedHost = "allowed.example"
	deniedHost  = "denied.example"

	egressRounds = 3
	enoughVisits = 5 // of each kind, to believe that something has changed
)

// visit is a line of `probe visit`, or of `probe host` whom it asked.
type visit struct {
	ID    string
	Sent  time.Time
	Kind  string `json:"visit"`
	Host  string
	Code  int
	Error string
}

// answered says whether the host answered.
func (v visit) answered() bool { return v.Code == http.StatusOK && v.Error == "" }

// refused says whether the mesh answered instead, by a rule.
func (v visit) refused() bool {
	return v.Code != 0 && v.Code != http.StatusOK || strings.Contains(v.Error, "access denied")
}

func (v visit) String() string {
	return fmt.Sprintf("%s %s %s: %d %s", v.Sent.Format("15:04:05.000"), v.Kind, v.Host, v.Code, v.Error)
}

// visitLog has the lines of a pod that asks or is asked.
type visitLog struct {
	log follower
	all []visit
}

func (w *world) visitsOf(p *corev1.Pod) *visitLog {
	return &visitLog{log: follower{pattern: filepath.Join(w.Root, ".run", p.Spec.NodeName, "pods", fmt.Sprintf("%s_%s_%s", p.Namespace, p.Name, p.UID), "main", "*.log*")}}
}

func (l *visitLog) read() ([]visit, error) {
	err := l.log.read(func(text []byte) error {
		l.all = append(l.all, parseVisits(text)...)
		return nil
	})
	return l.all, err
}

// parseVisits reads whole lines of a container's log file.
func parseVisits(text []byte) (out []visit) {
	for line := range bytes.Lines(text) {
		parts := bytes.SplitN(line, []byte(" "), 4) // time, stream, tag
		var v visit
		if len(parts) == 4 && json.Unmarshal(parts[3], &v) == nil && v.Kind != "" {
			out = append(out, v)
		}
	}
	return out
}

// window is a time in which a host is denied.
type window struct{ from, to time.Time }

// leakedIn are the visits of a host that were sent while it was denied.
func leakedIn(asked []visit, denied []window) (out []visit) {
	for _, v := range asked {
		for _, d := range denied {
			if v.Sent.After(d.from) && v.Sent.Before(d.to) {
				out = append(out, v)
			}
		}
	}
	return out
}

// outward is a pod that asks two hosts all the time.
type outward struct {
	*world
	home            string
	asks            *visitLog
	allowed, denied *visitLog // what the hosts say
	windows         []window
}

// egress has a pod ask other hosts all the time while rules come and go and agents are
// replaced. What is denied must not come to the host, and what is allowed must not be
// refused.
func egress(ctx context.Context, w *world, r *result) error {
	o, err := w.outward(ctx)
	if err != nil {
		return err
	}
	c := &r.traffic
	if err := o.turn(ctx, c, false); err != nil { // what is made once counts to the start
		return fmt.Errorf("warming up: %w", err)
	}
	start, err := w.atRest(ctx)
	if err != nil {
		return err
	}
	for i := range egressRounds {
		if err := o.turn(ctx, c, i == egressRounds-1); err != nil {
			return fmt.Errorf("round %d: %w", i+1, err)
		}
	}
	return errors.Join(w.backTo(ctx, c, start), w.sound(ctx, c), o.judge(c))
}

// outward starts the hosts and who asks them.
func (w *world) outward(ctx context.Context) (*outward, error) {
	home, err := w.home(ctx, "egress")
	if err != nil {
		return nil, err
	}
	o := &outward{world: w, home: home}
	var aliases []corev1.HostAlias
	for name, log := range map[string]**visitLog{allowedHost: &o.allowed, deniedHost: &o.denied} {
		p := pod(home, strings.TrimSuffix(name, ".example"), "none", "", w.nodes[1], "probe", "host")
		p.Labels, p.Annotations = nil, nil // it is not on the mesh
		if err := w.started(ctx, p); err != nil {
			return nil, err
		}
		aliases = append(aliases, corev1.HostAlias{IP: p.Status.PodIP, Hostnames: []string{name}})
		*log = w.visitsOf(p)
	}
	p := pod(home, "asks", "none", "ebpf", w.nodes[0], "probe", "visit", allowedHost, deniedHost)
	p.Spec.HostAliases = aliases
	if err := w.started(ctx, p); err != nil {
		return nil, err
	}
	o.asks = w.visitsOf(p)
	return o, nil
}

// started makes a pod and waits until it runs.
func (w *world) started(ctx context.Context, p *corev1.Pod) error {
	if err := w.create(ctx, p); err != nil {
		return err
	}
	return w.until(ctx, p.Name+" to run", func(ctx context.Context) error {
		if err := w.Get(ctx, client.ObjectKeyFromObject(p), p); err != nil {
			return err
		}
		if !kube.PodReady(p) {
			return errors.New("it does not")
		}
		return nil
	})
}

// turn lets a rule come, change and go.
func (o *outward) turn(ctx context.Context, c *trafficCounts, replace bool) error {
	if err := o.hears(ctx, deniedHost, "an answer", visit.answered); err != nil {
		return err
	}
	b := &meshv1alpha1.CircuitBreaker{
		ObjectMeta: metav1.ObjectMeta{Namespace: o.home, Name: "hosts"},
		Spec: meshv1alpha1.CircuitBreakerSpec{
			Selector: &metav1.LabelSelector{MatchLabels: map[string]string{meshv1alpha1.EnableProxyLabel: "true"}},
			TrafficInterceptRules: []meshv1alpha1.TrafficInterceptRule{{
				Name: "allowed", InterceptType: meshv1alpha1.InterceptWhitelist, ContentType: meshv1alpha1.ContentNormal, Contents: []string{allowedHost},
			}},
		},
	}
	if err := o.create(ctx, b); err != nil {
		return err
	}
	if err := o.inForce(ctx, b); err != nil {
		return err
	}
	denied := window{from: time.Now()}
	if err := o.hears(ctx, deniedHost, "a refusal", visit.refused); err != nil {
		return err
	}
	b.Spec.TrafficInterceptRules[0].Contents = append(b.Spec.TrafficInterceptRules[0].Contents, "other.example")
	if err := o.Update(ctx, b); err != nil {
		return fmt.Errorf("changing what is allowed: %w", err)
	}
	if err := o.inForce(ctx, b); err != nil {
		return err
	}
	if replace {
		if err := o.replaceAgents(ctx, c); err != nil {
			return err
		}
		o.say("  new agents, under the rule")
	}
	for host, is := range map[string]func(visit) bool{deniedHost: visit.refused, allowedHost: visit.answered} {
		if err := o.hears(ctx, host, "what the rule says", is); err != nil {
			return err
		}
	}
	denied.to = time.Now()
	o.windows = append(o.windows, denied)
	if err := o.Delete(ctx, b); err != nil {
		return fmt.Errorf("removing the rule: %w", err)
	}
	err := o.hears(ctx, deniedHost, "an answer", visit.answered)
	o.say("  denied for %v, and answered %v after", denied.to.Sub(denied.from).Round(time.Millisecond), time.Since(denied.to).Round(time.Millisecond))
	return err
}

// hears waits for some visits of each kind, from now on, that a host has.
func (o *outward) hears(ctx context.Context, host, what string, is func(visit) bool) error {
	from := time.Now()
	return o.until(ctx, what+" of "+host, func(context.Context) error {
		all, err := o.asks.read()
		if err != nil {
			return kube.Never(err)
		}
		heard, last := map[string]int{}, visit{}
		for _, v := range all {
			if v.Host == host && v.Sent.After(from) {
				if last = v; is(v) {
					heard[v.Kind]++
				}
			}
		}
		for _, kind := range []string{"http", "kept", "https"} {
			if heard[kind] < enoughVisits {
				return fmt.Errorf("%s was heard %d times; the last: %s", kind, heard[kind], last)
			}
		}
		return nil
	})
}

// judge counts by what the hosts and who asked them say.
func (o *outward) judge(c *trafficCounts) error {
	asked, err := o.asks.read()
	if err != nil {
		return err
	}
	came, err := o.denied.read()
	if err != nil {
		return err
	}
	served, err := o.allowed.read()
	if err != nil {
		return err
	}
	if len(came) == 0 || len(served) == 0 {
		return errors.New("the hosts were not asked at all")
	}
	failed := 0
	for _, v := range asked {
		switch {
		case v.Host == deniedHost && v.refused():
			c.denied++
		case v.Host == allowedHost && v.refused():
			if c.refused++; c.refused <= 3 {
				o.say("  ! refused: %s", v)
			}
		case v.Host == allowedHost && !v.answered():
			if failed++; failed <= 3 {
				o.say("  failed, and not by a rule: %s", v)
			}
		}
	}
	leaked := leakedIn(came, o.windows)
	for _, v := range leaked[:min(3, len(leaked))] {
		o.say("  ! it came to the host: %s", v)
	}
	c.asked += len(asked)
	c.leaked += len(leaked)
	o.say("  of %d requests %d were denied, %d of those came to the host; of those allowed %d were refused, and %d failed on their way",
		len(asked), c.denied, len(leaked), c.refused, failed)
	return nil
}
