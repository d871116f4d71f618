package traffic

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/tests/chaos/harness"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

const (
	allowedHost = "allowed.example"
	deniedHost  = "denied.example"

	egressRounds = 3
	minVisits    = 5 // of each kind, as proof of a change
)

// egressTest is a pod that sends requests to two hosts all the time.
type egressTest struct {
	*suite
	home            string
	asks            *visitLog // of the pod
	allowed, denied *visitLog // of the hosts
	windows         []window
}

// egress runs a pod that sends requests to other hosts while rules are created, changed and
// deleted and agents are replaced. Denied requests must not arrive at the host, and allowed
// ones must not be refused.
func (s *suite) egress(ctx context.Context) error {
	o, err := s.startEgress(ctx)
	if err != nil {
		return err
	}
	if err := o.changeRules(ctx, false); err != nil { // what is allocated once counts in the start
		return fmt.Errorf("warming up: %w", err)
	}
	start, err := s.waitAtRest(ctx)
	if err != nil {
		return err
	}
	for i := range egressRounds {
		if err := o.changeRules(ctx, i == egressRounds-1); err != nil {
			return fmt.Errorf("round %d: %w", i+1, err)
		}
	}
	return errors.Join(s.checkUsage(ctx, start), s.countPanics(ctx), o.judge())
}

// startEgress starts the hosts and the pod that sends requests to them.
func (s *suite) startEgress(ctx context.Context) (*egressTest, error) {
	home, err := s.CreatePodNamespace(ctx, "egress")
	if err != nil {
		return nil, err
	}
	o := &egressTest{suite: s, home: home}
	var aliases []corev1.HostAlias
	for name, log := range map[string]**visitLog{allowedHost: &o.allowed, deniedHost: &o.denied} {
		p := harness.NewPlainPod(home, strings.TrimSuffix(name, ".example"), harness.ProbeImage, s.Nodes[1], "probe", "host")
		if err := s.CreateReady(ctx, p); err != nil {
			return nil, err
		}
		aliases = append(aliases, corev1.HostAlias{IP: p.Status.PodIP, Hostnames: []string{name}})
		*log = s.visitsOf(p)
	}
	p := harness.NewPod(home, "asks", "none", "ebpf", s.Nodes[0], "probe", "visit", allowedHost, deniedHost)
	p.Spec.HostAliases = aliases
	if err := s.CreateReady(ctx, p); err != nil {
		return nil, err
	}
	o.asks = s.visitsOf(p)
	return o, nil
}

func (s *suite) visitsOf(p *corev1.Pod) *visitLog {
	return &visitLog{log: harness.Follower{Pattern: s.ContainerLog(p)}}
}

// changeRules creates, changes and deletes a rule that denies a host.
func (o *egressTest) changeRules(ctx context.Context, replace bool) error {
	if err := o.waitVisits(ctx, deniedHost, "an answer", visit.answered); err != nil {
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
	if err := o.CreateAll(ctx, b); err != nil {
		return err
	}
	if err := o.waitBreakerInForce(ctx, b); err != nil {
		return err
	}
	denied := window{from: time.Now()}
	if err := o.waitVisits(ctx, deniedHost, "a refusal", visit.refused); err != nil {
		return err
	}
	b.Spec.TrafficInterceptRules[0].Contents = append(b.Spec.TrafficInterceptRules[0].Contents, "other.example")
	if err := o.Update(ctx, b); err != nil {
		return fmt.Errorf("changing what is allowed: %w", err)
	}
	if err := o.waitBreakerInForce(ctx, b); err != nil {
		return err
	}
	if replace {
		if err := o.replaceAgents(ctx); err != nil {
			return err
		}
		o.Logf("  new agents, under the rule")
	}
	for host, is := range map[string]func(visit) bool{deniedHost: visit.refused, allowedHost: visit.answered} {
		if err := o.waitVisits(ctx, host, "what the rule says", is); err != nil {
			return err
		}
	}
	denied.to = time.Now()
	o.windows = append(o.windows, denied)
	if err := o.Delete(ctx, b); err != nil {
		return fmt.Errorf("removing the rule: %w", err)
	}
	err := o.waitVisits(ctx, deniedHost, "an answer", visit.answered)
	o.Logf("  denied for %v, and answered %v after", denied.to.Sub(denied.from).Round(time.Millisecond), time.Since(denied.to).Round(time.Millisecond))
	return err
}

// waitVisits waits for some visits of a host of each kind that match is, from now on.
func (o *egressTest) waitVisits(ctx context.Context, host, what string, is func(visit) bool) error {
	from := time.Now()
	return o.Until(ctx, what+" of "+host, func(context.Context) error {
		all, err := o.asks.read()
		if err != nil {
			return kube.Never(err)
		}
		seen, last := map[string]int{}, visit{}
		for _, v := range all {
			if v.Host == host && v.Sent.After(from) {
				if last = v; is(v) {
					seen[v.Kind]++
				}
			}
		}
		for _, kind := range []string{"http", "kept", "https"} {
			if seen[kind] < minVisits {
				return fmt.Errorf("%s was received %d times; the last: %s", kind, seen[kind], last)
			}
		}
		return nil
	})
}

// judge counts by what the hosts and the pod have logged.
func (o *egressTest) judge() error {
	c := &o.counts
	asked, askedErr := o.asks.read()
	came, cameErr := o.denied.read()
	served, servedErr := o.allowed.read()
	if err := errors.Join(askedErr, cameErr, servedErr); err != nil {
		return err
	}
	if len(came) == 0 || len(served) == 0 {
		return errors.New("the hosts were not asked at all")
	}
	failed := o.countVisits(asked)
	leaked := leakedIn(came, o.windows)
	harness.LogSome(o.Testbed, 3, "  ! it came to the host: %s", leaked)
	c.asked += len(asked)
	c.leaked += len(leaked)
	o.Logf("  of %d requests %d were denied, %d of those came to the host; of those allowed %d were refused, and %d failed on their way",
		len(asked), c.denied, len(leaked), c.refused, failed)
	return nil
}

// countVisits counts denied and refused visits, and returns how many allowed ones failed
// for other reasons.
func (o *egressTest) countVisits(asked []visit) (failed int) {
	c := &o.counts
	for _, v := range asked {
		switch {
		case v.Host == deniedHost && v.refused():
			c.denied++
		case v.Host == allowedHost && v.refused():
			if c.refused++; c.refused <= 3 {
				o.Logf("  ! refused: %s", v)
			}
		case v.Host == allowedHost && !v.answered():
			if failed++; failed <= 3 {
				o.Logf("  failed, and not by a rule: %s", v)
			}
		}
	}
	return failed
}
