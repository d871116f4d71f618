package report

import (
	"cmp"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/operator"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/render"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/snapshot"
)

// Shards is the state of the shards of an operator.
type Shards struct {
	Namespace string `json:"namespace"`
	Root      string `json:"root"`
	// State is the reason of the condition Ready.
	State  string  `json:"state"`
	Shards []Shard `json:"shards"`
	// Notes say what the report lacks, and what the shards do.
	Notes []string `json:"notes,omitempty"`
}

// Shard is the state of a shard. What is unknown is absent.
type Shard struct {
	Name string `json:"name"`
	// Namespaces is the number of namespaces that it owns, and Objects that of divided objects in
	// them.
	Namespaces *int32 `json:"namespaces,omitempty"`
	Objects    *int64 `json:"objects,omitempty"`
	// Share is Objects in percent of the mean of the shards that divide the keys evenly.
	Share       *int                 `json:"sharePercent,omitempty"`
	LeaderState operator.LeaderState `json:"leaderState"`
	Leader      string               `json:"leader,omitempty"`
	LeaderNode  string               `json:"leaderNode,omitempty"`
	// LeaderlessSince is since when it has had no leader.
	LeaderlessSince *time.Time `json:"leaderlessSince,omitempty"`
	Members         int32      `json:"members"`
	Ready           int32      `json:"readyMembers"`
	// Pods are its labelled pods, which the status may not count yet.
	Pods []string `json:"pods,omitempty"`
	// Captures are the capture modes of its members.
	Captures  []string `json:"capture,omitempty"`
	Handovers []Move   `json:"handovers,omitempty"`
	// Unready says why members are not ready.
	Unready []string `json:"unready,omitempty"`
	// Pending says that keys are planned for the shard whose handover has not begun.
	Pending string `json:"pending,omitempty"`

	title string
}

// Move is a handover of keys.
type Move struct {
	From  string    `json:"from,omitempty"`
	To    string    `json:"to,omitempty"`
	Phase string    `json:"phase"`
	Since time.Time `json:"since"`
	// WaitsFor names the pods that the phase waits for, and why.
	WaitsFor []string `json:"waitsFor,omitempty"`
}

// ShardsOf returns the state of the shards of a configuration.
func ShardsOf(s *snapshot.Snapshot, c *v1alpha1.ShardingConfig) (Shards, error) {
	out := Shards{Namespace: c.Namespace, Root: c.Name, State: cmp.Or(operator.Condition(c, v1alpha1.ConditionReady).Reason, "Unknown"), Shards: []Shard{}}
	if len(c.Status.Conditions) == 0 {
		return out, fmt.Errorf("ShardingConfig %s/%s has no status: see whether the manager runs, by kubectl ctrlmesh status", c.Namespace, c.Name)
	}
	shards, err := operator.Shards(s, c)
	if err != nil {
		return out, err
	}
	mean := meanOf(c, shards)
	for i := range shards {
		out.Shards = append(out.Shards, shardOf(c, &shards[i], mean))
	}
	switch ready := operator.Condition(c, v1alpha1.ConditionReady); {
	case len(shards) == 0:
		out.Notes = append(out.Notes, "no shard exists: "+ready.Message)
	case ready.Reason == string(v1alpha1.ReasonNotEnoughPods):
		out.Notes = append(out.Notes, ready.Message)
	}
	if c.Status.Root != nil && c.Status.Root.Weighing != "" {
		out.Notes = append(out.Notes, "objects are not counted: "+c.Status.Root.Weighing)
	}
	if !s.Has(snapshot.Locks) {
		out.Notes = append(out.Notes, "leaders are those that the manager reported last, because the Leases cannot be read")
	}
	return out, nil
}

// meanOf returns the mean weight of the shards that divide the keys evenly; 0 if it is unknown.
func meanOf(c *v1alpha1.ShardingConfig, shards []operator.Shard) float64 {
	sum, count := int64(0), 0
	for i := range shards {
		if c.Spec.Root != nil && !operator.Pinned(c.Spec.Root, shards[i].Status.Name) {
			sum += shards[i].Status.Weight
			count++
		}
	}
	if count == 0 {
		return 0
	}
	return float64(sum) / float64(count)
}

func shardOf(c *v1alpha1.ShardingConfig, o *operator.Shard, mean float64) Shard {
	out := Shard{
		Name: o.Status.Name, LeaderState: o.Leader.State, Leader: o.Leader.Pod, LeaderNode: o.Leader.Node,
		Members: o.Status.Members, Ready: o.Ready(), Captures: o.Captures(), Unready: o.Unready(), title: o.Status.Name,
	}
	for _, pod := range o.Pods {
		out.Pods = append(out.Pods, pod.Name)
	}
	if o.Leader.State == operator.Missing && !o.Leader.Since.IsZero() {
		out.LeaderlessSince = new(o.Leader.Since.UTC())
	}
	if c.Spec.Root == nil {
		return out
	}
	out.title = operator.Short(c.Spec.Root, out.Name)
	if operator.KeyOf(c) == v1alpha1.KeyNamespace {
		out.Namespaces = new(o.Status.Namespaces)
	}
	if mean > 0 || o.Status.Weight > 0 {
		out.Objects = new(o.Status.Weight)
	}
	if mean > 0 && !operator.Pinned(c.Spec.Root, out.Name) {
		out.Share = new(int(math.Round(100 * float64(o.Status.Weight) / mean)))
	}
	for _, h := range c.Status.Root.Handovers {
		if h.From == out.Name || h.To == out.Name {
			out.Handovers = append(out.Handovers, moveOf(h))
		}
	}
	if !o.Wanted.Minus(o.Target).Empty() {
		out.Pending = "more keys are planned for it"
	}
	return out
}

func moveOf(h v1alpha1.HandoverStatus) Move {
	return Move{From: h.From, To: h.To, Phase: h.Phase, Since: h.Since.UTC(), WaitsFor: h.WaitsFor}
}

// Findings reports whether a shard does not work as it should.
func (s Shards) Findings() bool {
	for _, one := range s.Shards {
		if one.LeaderState == operator.Missing || one.Ready < max(one.Members, 1) {
			return true
		}
	}
	return len(s.Shards) == 0 && s.State != string(v1alpha1.ReasonDisabled)
}

// WriteText implements render.Report.
func (s Shards) WriteText(t *render.Text) {
	var rows [][]string
	for _, one := range s.Shards {
		rows = append(rows, []string{
			one.title, render.Optional(one.Namespaces), one.objects(), one.leader(),
			fmt.Sprintf("%d/%d", one.Ready, one.Members), strings.Join(one.Captures, ","), one.handover(),
		})
	}
	t.Table([]string{"SHARD", "NAMESPACES", "OBJECTS", "LEADER", "READY", "CAPTURE", "HANDOVER"}, rows)
	for _, note := range s.Notes {
		t.Line("%s", note)
	}
}

func (s Shard) objects() string {
	if s.Share == nil {
		return render.Optional(s.Objects)
	}
	return fmt.Sprintf("%s (%d%%)", render.Optional(s.Objects), *s.Share)
}

func (s Shard) leader() string {
	switch s.LeaderState {
	case operator.Leads:
		return s.Leader
	case operator.Missing:
		return "NONE"
	}
	return ""
}

// handover describes the handovers of the shard in one line.
func (s Shard) handover() string {
	var all []string
	for _, h := range s.Handovers {
		text := "gains keys"
		if h.From == s.Name {
			text = "releases keys"
		}
		all = append(all, text+waiting(h))
	}
	if s.Pending != "" {
		all = append(all, s.Pending)
	}
	if len(all) == 0 && len(s.Unready) > 0 {
		all = append(all, "waits for "+first(s.Unready))
	}
	return strings.Join(all, "; ")
}

// waiting says what a handover waits for.
func waiting(m Move) string {
	if len(m.WaitsFor) == 0 {
		return fmt.Sprintf(" (%s)", m.Phase)
	}
	return fmt.Sprintf(" (%s), waits for %s", m.Phase, first(m.WaitsFor))
}

// first returns the first of some texts, and the number of the others.
func first(texts []string) string {
	if more := len(texts) - 1; more > 0 {
		return fmt.Sprintf("%s (and %d more)", texts[0], more)
	}
	return texts[0]
}
