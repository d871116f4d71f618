package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
	tallyv1 "github.com/ctrlmesh/ctrlmesh/tests/operators/tally/v1"
)

const (
	bear      = 3 * time.Second // how long each fault lasts at least
	faultsEnd = "10m"           // if this program does not end them
)

// underFaults has the operator at work under each fault, then under all together, with
// limits, a breaker that opens, new agents and the manager's end. After both nothing may
// be left of it: the agents hold as much as before, and every object is reconciled.
func underFaults(ctx context.Context, w *world, r *result) error {
	return w.withOperator(ctx, r, "faults", divided(2, meshv1alpha1.OnChangeRelist), func(ctx context.Context, o *operator) error {
		c := &r.traffic
		if err := o.warmUp(ctx, c); err != nil {
			return fmt.Errorf("warming up: %w", err)
		}
		start, err := w.atRest(ctx)
		if err != nil {
			return err
		}
		if err := o.each(ctx, c); err != nil {
			return err
		}
		if err := o.recovered(ctx); err != nil {
			return err
		}
		if err := w.backTo(ctx, c, start); err != nil {
			return err
		}
		if err := o.allTogether(ctx, c); err != nil {
			return err
		}
		if err := o.converges(ctx, c); err != nil {
			return err
		}
		// The writer has ended, and is no client of the agents.
		if err := o.recovered(ctx); err != nil {
			return err
		}
		return errors.Join(w.backTo(ctx, c, start), w.sound(ctx, c))
	})
}

// warmUp has the agents make what is made once, by the first to need it: it counts to
// the start.
func (o *operator) warmUp(ctx context.Context, c *trafficCounts) error {
	if err := o.endure(ctx, c, together); err != nil {
		return err
	}
	return o.recovered(ctx)
}

// each has the operator bear one fault after the other.
func (o *operator) each(ctx context.Context, c *trafficCounts) error {
	if err := o.loseLocks(ctx, c); err != nil {
		return fmt.Errorf("%s: %w", lockLost.name, err)
	}
	for _, b := range bouts {
		if err := o.endure(ctx, c, b); err != nil {
			return fmt.Errorf("%s: %w", b.name, err)
		}
	}
	return nil
}

// endure has the operator bear some faults for a while, and until each kind of them was
// injected.
func (o *operator) endure(ctx context.Context, c *trafficCounts, b bout) error {
	begun := time.Now()
	end, err := o.inject(ctx, b)
	if err != nil {
		return err
	}
	err = o.breakOff(ctx)
	if err == nil {
		err = o.bears(ctx, b, begun)
	}
	return errors.Join(err, end(c))
}

// breakOff breaks the operator's connections to its agents off: faults of watches come
// only to those that begin under them. The agents' own to the apiserver stay: of what
// breaks there it is not known for a minute whether it takes effect.
func (o *operator) breakOff(ctx context.Context) error {
	pods, err := o.pods(ctx)
	if err != nil {
		return err
	}
	for i := range pods {
		broken, err := o.inNetns(ctx, &pods[i], "ss", "-K", "-tnH", "state", "established", "dst", "127.0.0.0/8")
		if err != nil {
			return fmt.Errorf("breaking connections off: %w", err)
		}
		if broken == "" {
			return fmt.Errorf("%s has no connection to an agent", pods[i].Name)
		}
	}
	return nil
}

func (o *operator) bears(ctx context.Context, b bout, begun time.Time) error {
	select {
	case <-time.After(bear): // the time that faults last is the test
	case <-ctx.Done():
		return ctx.Err()
	}
	var by map[string]int
	err := o.until(ctx, "faults", func(ctx context.Context) (err error) {
		if by, err = o.injected(ctx, b.name); err != nil {
			return err
		}
		for _, kind := range b.kinds {
			if by[kind] == 0 {
				return fmt.Errorf("no %s was injected", kind)
			}
		}
		return nil
	})
	o.say("  %s for %v: %v", b.name, time.Since(begun).Round(100*time.Millisecond), tell(by))
	return err
}

// loseLocks takes the operator's locks away, until each of its processes gave up.
func (o *operator) loseLocks(ctx context.Context, c *trafficCounts) error {
	before, err := o.pods(ctx)
	if err != nil {
		return err
	}
	begun := time.Now()
	end, err := o.inject(ctx, lockLost)
	if err != nil {
		return err
	}
	ended := 0
	err = o.until(ctx, "the operator to give up", func(ctx context.Context) error {
		now, err := o.pods(ctx)
		if err != nil {
			return err
		}
		ended = 0
		for _, p := range now {
			i := slices.IndexFunc(before, func(b corev1.Pod) bool { return b.UID == p.UID })
			if i >= 0 && kube.Restarts(&p) > kube.Restarts(&before[i]) {
				ended++
			}
		}
		if ended < len(before) {
			return fmt.Errorf("%d of %d did", ended, len(before))
		}
		return nil
	})
	c.restarts += ended
	if err := errors.Join(err, end(c)); err != nil {
		return err
	}
	o.say("  %s for %v: %d of %d gave up", lockLost.name, time.Since(begun).Round(100*time.Millisecond), ended, len(before))
	return o.recovered(ctx)
}

// inject puts faults in force, and returns what counts and ends them.
func (o *operator) inject(ctx context.Context, b bout) (end func(*trafficCounts) error, err error) {
	lasts := meshv1alpha1.Duration(faultsEnd)
	f := &meshv1alpha1.FaultInjection{
		ObjectMeta: metav1.ObjectMeta{Namespace: o.home, Name: b.name},
		Spec:       meshv1alpha1.FaultInjectionSpec{Selector: o.selector(), Duration: &lasts, HTTPFaultInjections: b.rules},
	}
	if err := o.create(ctx, f); err != nil {
		return nil, err
	}
	end = func(c *trafficCounts) error {
		ctx := context.WithoutCancel(ctx)
		by, err := o.injected(ctx, b.name)
		c.inject(by)
		return errors.Join(err, client.IgnoreNotFound(o.Delete(ctx, f)))
	}
	err = o.until(ctx, b.name+" to be in force", func(ctx context.Context) error {
		if err := o.Get(ctx, client.ObjectKeyFromObject(f), f); err != nil {
			return err
		}
		return inForce(f.Generation, f.Status.ObservedGeneration, f.Status.Pods, f.Status.PodsInForce)
	})
	if err != nil {
		return nil, errors.Join(err, end(&trafficCounts{}))
	}
	return end, nil
}

// inForce says why a CircuitBreaker or FaultInjection is not.
func inForce(generation, observed int64, pods, in int32) error {
	switch {
	case observed < generation:
		return errors.New("the manager has not seen it")
	case pods == 0:
		return errors.New("it selects no pods")
	case in < pods:
		return fmt.Errorf("it is in %d pods of %d", in, pods)
	}
	return nil
}

func (o *operator) selector() *metav1.LabelSelector {
	return &metav1.LabelSelector{MatchLabels: map[string]string{"app": operatorName}}
}

// injected are the faults of a FaultInjection, as the agents count them now.
func (o *operator) injected(ctx context.Context, name string) (map[string]int, error) {
	return o.counted(ctx, "ctrlmesh_faults_injected_total", "kind", map[string]string{"namespace": o.home, "faultinjection": name})
}

// counted adds up series of all agents, by one of their labels.
func (w *world) counted(ctx context.Context, metric, by string, labels map[string]string) (map[string]int, error) {
	out := map[string]int{}
	for _, node := range w.nodes {
		families, err := w.scrape(ctx, node)
		if err != nil {
			return nil, err
		}
		values := map[string]bool{}
		for _, series := range families[metric].GetMetric() {
			for _, l := range series.GetLabel() {
				if l.GetName() == by {
					values[l.GetValue()] = true
				}
			}
		}
		for value := range values {
			these := maps.Clone(labels)
			these[by] = value
			if n := int(total(families[metric], these)); n > 0 {
				out[value] += n
			}
		}
	}
	return out, nil
}

// tell of counts, in order.
func tell(by map[string]int) string {
	var out []string
	for _, kind := range slices.Sorted(maps.Keys(by)) {
		out = append(out, fmt.Sprintf("%d %s", by[kind], kind))
	}
	return strings.Join(out, ", ")
}

// recovered waits until the operator watches its objects again and has reconciled what
// they are by now.
func (o *operator) recovered(ctx context.Context) error {
	var wanted map[types.NamespacedName]int64
	return o.until(ctx, "the operator to catch up", func(ctx context.Context) error {
		var list tallyv1.TallyList
		if err := o.List(ctx, &list); err != nil {
			return err
		}
		if wanted == nil {
			wanted = map[types.NamespacedName]int64{}
			for _, t := range list.Items {
				wanted[client.ObjectKeyFromObject(&t)] = t.Generation
			}
		}
		for _, t := range list.Items {
			if t.Status.ObservedGeneration < wanted[client.ObjectKeyFromObject(&t)] {
				return fmt.Errorf("%s/%s was not reconciled since generation %d", t.Namespace, t.Name, t.Status.ObservedGeneration)
			}
		}
		pods, err := o.pods(ctx)
		if err != nil {
			return err
		}
		watches := 0.0
		for _, node := range o.nodes {
			families, err := o.scrape(ctx, node)
			if err != nil {
				return err
			}
			watches += total(families["ctrlmesh_watches"], map[string]string{"namespace": o.home, "resource": "tallies"})
		}
		if int(watches) != len(pods) {
			return fmt.Errorf("%d pods have %.0f watches", len(pods), watches)
		}
		return nil
	})
}

// limiting are the CircuitBreakers of the operator.
var limiting = []string{"cap", "opens"}

// limit puts one in force that caps what the operator writes, and one that opens when
// too much of it fails.
func (o *operator) limit(ctx context.Context) (end func() error, err error) {
	writes := []meshv1alpha1.ResourceRule{{
		APIGroups: []string{tallyv1.GroupVersion.Group}, Resources: []string{"tallies/status"}, Verbs: []string{"update"}, Namespaces: []string{"*"},
	}}
	sleeps := meshv1alpha1.Duration("1s")
	rules := map[string]meshv1alpha1.Limiting{
		"cap": {Bucket: &meshv1alpha1.Bucket{Burst: 20, Interval: "1s", Limit: 20}, TriggerPolicy: meshv1alpha1.TriggerLimiterOnly},
		"opens": {
			Trip:          &meshv1alpha1.Trip{Window: "5s", MinRequests: 5, ErrorPercent: "5"},
			RecoverPolicy: &meshv1alpha1.RecoverPolicy{Type: meshv1alpha1.RecoverSleepingWindow, SleepingWindowSize: &sleeps},
		},
	}
	var made []*meshv1alpha1.CircuitBreaker
	end = func() (err error) {
		for _, b := range made {
			err = errors.Join(err, client.IgnoreNotFound(o.Delete(context.WithoutCancel(ctx), b)))
		}
		return err
	}
	for _, name := range limiting {
		rule := rules[name]
		rule.Name, rule.ResourceRules = "writes", writes
		b := &meshv1alpha1.CircuitBreaker{
			ObjectMeta: metav1.ObjectMeta{Namespace: o.home, Name: name},
			Spec:       meshv1alpha1.CircuitBreakerSpec{Selector: o.selector(), RateLimitings: []meshv1alpha1.Limiting{rule}},
		}
		if err := o.create(ctx, b); err != nil {
			return end, err
		}
		made = append(made, b)
	}
	for _, b := range made {
		if err := o.inForce(ctx, b); err != nil {
			return end, err
		}
	}
	return end, nil
}

// inForce waits until a CircuitBreaker is in force as it was written.
func (w *world) inForce(ctx context.Context, b *meshv1alpha1.CircuitBreaker) error {
	return w.until(ctx, b.Name+" to be in force", func(ctx context.Context) error {
		if err := w.Get(ctx, client.ObjectKeyFromObject(b), b); err != nil {
			return err
		}
		return inForce(b.Generation, b.Status.ObservedGeneration, b.Status.Pods, b.Status.PodsInForce)
	})
}

// allTogether has the operator bear all faults and limits at once, while the agents
// are replaced and the manager is killed.
func (o *operator) allTogether(ctx context.Context, c *trafficCounts) (err error) {
	free, err := o.limit(ctx)
	if free != nil {
		defer func() { err = errors.Join(err, free()) }()
	}
	if err != nil {
		return err
	}
	end, err := o.inject(ctx, together)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, end(c)) }()
	if err := errors.Join(o.bears(ctx, bout{together.name, []string{"delay", "abort"}, nil}, time.Now()), o.refuses(ctx, c, len(limiting))); err != nil {
		return err
	}
	// Series end with the process that counts.
	by, err := o.injected(ctx, together.name)
	if err != nil {
		return err
	}
	c.inject(by)
	if err := o.replaceAgents(ctx, c); err != nil {
		return err
	}
	if err := killManager(ctx, o, nil, &shardingCounts{}); err != nil {
		return err
	}
	o.say("  new agents, and the manager was killed")
	// All of it is in force in the new agents, of which all watches are new.
	return errors.Join(o.bears(ctx, together, time.Now()), o.refuses(ctx, c, 1))
}

// refuses waits until some CircuitBreakers have refused something, and counts it. While
// one is open, the other has little to refuse.
func (o *operator) refuses(ctx context.Context, c *trafficCounts, enough int) error {
	var by map[string]int
	err := o.until(ctx, "refusals", func(ctx context.Context) (err error) {
		if by, err = o.counted(ctx, "ctrlmesh_limited_requests_total", "circuitbreaker", map[string]string{"namespace": o.home}); err != nil {
			return err
		}
		if len(by) < enough {
			return fmt.Errorf("of %d CircuitBreakers %d did: %s", len(limiting), len(by), tell(by))
		}
		return nil
	})
	if c.limited == nil {
		c.limited = map[string]int{}
	}
	for name, n := range by {
		c.limited[name] += n
	}
	o.say("  refused by CircuitBreaker: %v", tell(by))
	return err
}

// converges waits until all objects are reconciled, now that nothing harms the operator
// and nobody changes them.
func (o *operator) converges(ctx context.Context, c *trafficCounts) error {
	begun := time.Now()
	lost, _, _, err := o.write.finish(ctx)
	if err != nil {
		return err
	}
	c.took = time.Since(begun)
	var list tallyv1.TallyList
	if err := o.List(ctx, &list); err != nil {
		return fmt.Errorf("listing objects: %w", err)
	}
	c.objects = len(list.Items)
	c.converged = c.objects - len(lost)
	o.say("  %d of %d objects are reconciled, after %v", c.converged, c.objects, c.took.Round(time.Millisecond))
	return nil
}

// replaceAgents rolls the agents out anew, when it is known how the old ones fared.
func (w *world) replaceAgents(ctx context.Context, c *trafficCounts) error {
	if err := w.sound(ctx, c); err != nil {
		return err
	}
	if err := w.rollOut(ctx); err != nil {
		return err
	}
	c.handovers++
	return nil
}

// sound counts the panics of agents, those that they outlived and those that they did not.
func (w *world) sound(ctx context.Context, c *trafficCounts) error {
	if c.panics == nil {
		c.panics = map[types.UID]int{}
	}
	for _, node := range w.nodes {
		agent, err := w.agentPod(ctx, node)
		if err != nil {
			return err
		}
		families, err := w.scrape(ctx, node)
		if err != nil {
			return err
		}
		if families["ctrlmesh_panics_total"] == nil {
			return kube.Never(fmt.Errorf("the agent on %s does not count panics", node))
		}
		c.panics[agent.UID] = int(total(families["ctrlmesh_panics_total"], nil))
		for _, s := range agent.Status.ContainerStatuses {
			if t := s.LastTerminationState.Terminated; t != nil && t.FinishedAt.After(w.begun) {
				c.panics[agent.UID]++
				w.say("  ! the agent on %s ended with status %d at %s", node, t.ExitCode, t.FinishedAt.UTC().Format(time.TimeOnly))
			}
		}
	}
	return nil
}
