package report

import (
	"cmp"
	"fmt"
	"strings"
	"time"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/operator"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/render"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/snapshot"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
)

// Owner is the shard that owns a key now.
type Owner struct {
	Namespace string `json:"namespace"`
	Root      string `json:"root"`
	// KeyKind is Namespace, Object or Cluster, and Key the name or uid.
	KeyKind v1alpha1.Key `json:"keyKind"`
	Key     string       `json:"key"`
	// Shard is the owner; empty if no shard owns the key.
	Shard string `json:"shard,omitempty"`
	// Writable is false while no shard may write the key's objects.
	Writable        bool                 `json:"writable"`
	LeaderState     operator.LeaderState `json:"leaderState,omitempty"`
	Leader          string               `json:"leader,omitempty"`
	LeaderNode      string               `json:"leaderNode,omitempty"`
	LeaderlessSince *time.Time           `json:"leaderlessSince,omitempty"`
	// Move is the handover of the key that is in progress.
	Move *Move `json:"move,omitempty"`
	// Next is another shard that is to own the key, before a handover begins.
	Next string `json:"planned,omitempty"`
	// Summary says all this in one or two sentences.
	Summary string `json:"summary"`
}

// Key names what is to be looked up, by one of its fields.
type Key struct{ Namespace, UID, Cluster string }

// of returns the text that a root assigns by, or an error if it assigns by something else.
func (k Key) of(kind v1alpha1.Key) (string, error) {
	value, ask := k.Namespace, "name a namespace"
	switch kind {
	case v1alpha1.KeyObject:
		value, ask = k.UID, "name an object by --uid"
	case v1alpha1.KeyCluster:
		value, ask = k.Cluster, "name a cluster by --cluster"
	}
	if value == "" {
		return "", fmt.Errorf("this root assigns objects by spec.root.key %s: %s", kind, ask)
	}
	return value, nil
}

// OwnerOf returns the owner of a key, from the state in force. It returns an error if that state is
// missing or invalid.
func OwnerOf(s *snapshot.Snapshot, c *v1alpha1.ShardingConfig, key Key) (Owner, error) {
	out := Owner{Namespace: c.Namespace, Root: c.Name}
	if c.Spec.Root == nil {
		return out, fmt.Errorf("ShardingConfig %s/%s has no spec.root: its spec.limits say what it owns", c.Namespace, c.Name)
	}
	out.KeyKind = operator.KeyOf(c)
	var err error
	if out.Key, err = key.of(out.KeyKind); err != nil {
		return out, err
	}
	if c.Status.Root == nil {
		return out, fmt.Errorf("ShardingConfig %s/%s has no status.root, so that no owner is known: see whether the manager runs, by kubectl ctrlmesh status", c.Namespace, c.Name)
	}
	shards, err := operator.Shards(s, c)
	if err != nil {
		return out, err
	}
	hash := sharding.Hash(out.Key)
	if out.Move, err = moving(c, hash); err != nil {
		return out, err
	}
	for i := range shards {
		if shards[i].Owned.OwnsHash(hash) {
			out.owned(&shards[i])
			out.Writable = shards[i].Target.OwnsHash(hash) && !c.Status.Root.RolledBack
		}
	}
	for i := range shards {
		if o := &shards[i]; out.Move == nil && o.Wanted.OwnsHash(hash) && o.Status.Name != out.Shard {
			out.Next = o.Status.Name
		}
	}
	out.Summary = out.summarize(s, c)
	return out, nil
}

// owned fills in the owner.
func (o *Owner) owned(by *operator.Shard) {
	o.Shard = by.Status.Name
	o.LeaderState, o.Leader, o.LeaderNode = by.Leader.State, by.Leader.Pod, by.Leader.Node
	if by.Leader.State == operator.Missing && !by.Leader.Since.IsZero() {
		o.LeaderlessSince = new(by.Leader.Since.UTC())
	}
}

// moving returns the handover of a key; nil if there is none.
func moving(c *v1alpha1.ShardingConfig, hash uint64) (*Move, error) {
	for _, h := range c.Status.Root.Handovers {
		keys, err := sharding.Parse(h.Keys)
		if err != nil {
			return nil, fmt.Errorf("reading which keys of %s/%s move: %w", c.Namespace, c.Name, err)
		}
		if keys.OwnsHash(hash) {
			return new(moveOf(h)), nil
		}
	}
	return nil, nil
}

// Findings reports whether no shard works on the key.
func (o Owner) Findings() bool {
	return o.Shard == "" || !o.Writable || o.LeaderState == operator.Missing
}

// WriteText implements render.Report.
func (o Owner) WriteText(t *render.Text) { t.Line("%s", o.Summary) }

func (o Owner) summarize(s *snapshot.Snapshot, c *v1alpha1.ShardingConfig) string {
	short := func(shard string) string { return operator.Short(c.Spec.Root, shard) }
	text := fmt.Sprintf("no shard owns it (key: %s)", strings.ToLower(string(o.KeyKind)))
	if o.Shard != "" {
		text = fmt.Sprintf("shard %s (key: %s); %s", short(o.Shard), strings.ToLower(string(o.KeyKind)), o.leaderText(s.Now))
	} else if ready := operator.Condition(c, v1alpha1.ConditionReady); ready.Message != "" {
		text += fmt.Sprintf("; %s: %s", ready.Reason, ready.Message)
	}
	switch m := o.Move; {
	case c.Status.Root.RolledBack:
		text += ". All pods are in standby until the state is known again"
	case m != nil && m.To == o.Shard:
		text += fmt.Sprintf(". It came from shard %s%s", cmp.Or(short(m.From), "NONE"), waiting(*m))
	case m != nil:
		text += fmt.Sprintf(". It moves to shard %s%s", cmp.Or(short(m.To), "NONE"), waiting(*m))
	}
	return text + o.remarks(s, c)
}

// remarks returns what else a user must know about the owner.
func (o Owner) remarks(s *snapshot.Snapshot, c *v1alpha1.ShardingConfig) (text string) {
	if o.Shard != "" && !o.Writable && !c.Status.Root.RolledBack {
		text = "; no shard may write it until then"
	}
	if o.Next != "" {
		text += fmt.Sprintf(". It is planned for shard %s", operator.Short(c.Spec.Root, o.Next))
	}
	if c.Spec.DryRun {
		text += ". Nothing of this is enforced (spec.dryRun)"
	}
	if exists, known := s.Exists[o.Key]; o.KeyKind == v1alpha1.KeyNamespace && known && !exists {
		text += ". This namespace does not exist"
	}
	return text
}

func (o Owner) leaderText(now time.Time) string {
	switch o.LeaderState {
	case operator.Leads:
		if o.LeaderNode == "" {
			return "leader " + o.Leader
		}
		return fmt.Sprintf("leader %s on %s", o.Leader, o.LeaderNode)
	case operator.Missing:
		if o.LeaderlessSince == nil {
			return "no leader"
		}
		return fmt.Sprintf("no leader for %d s", int(now.Sub(*o.LeaderlessSince).Seconds()))
	case operator.Unneeded:
		return "no lock of the operator is known"
	}
	return "its leader is unknown"
}
