package audit

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strconv"
	"time"

	"k8s.io/apimachinery/pkg/types"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
)

// State has the scopes that a root's shards owned, from the request that wrote it to the one
// that wrote the next. It was committed at some time from Received to Ended.
type State struct {
	Version  uint64 // the object's resourceVersion, which increases
	Received time.Time
	Ended    time.Time
	Root     meshv1alpha1.RootStatus

	owned map[string]sharding.Scope // by shard
}

const statesResource = "shardingconfigs"

// States returns the states of a root in an audit log, oldest first. The log must have the
// writes of the root at the level RequestResponse.
func States(log io.Reader, root types.NamespacedName, since time.Time) ([]State, error) {
	var out []State
	err := eachLine(log, func(n int, line []byte) error {
		if !bytes.Contains(line, []byte(`"`+statesResource+`"`)) || !bytes.Contains(line, []byte(`"responseObject"`)) {
			return nil
		}
		var e auditv1.Event
		if err := json.Unmarshal(line, &e); err != nil {
			return fmt.Errorf("audit log, line %d: %w", n, err)
		}
		ref := e.ObjectRef
		if ref == nil || ref.Resource != statesResource || ref.Namespace != root.Namespace || ref.Name != root.Name ||
			e.Stage != auditv1.StageResponseComplete || e.ResponseStatus == nil || e.ResponseStatus.Code >= 300 ||
			e.RequestReceivedTimestamp.Time.Before(since) {
			return nil
		}
		s, err := state(&e)
		if err != nil {
			return fmt.Errorf("audit log, line %d: %w", n, err)
		}
		out = append(out, s)
		return nil
	})
	slices.SortStableFunc(out, func(a, b State) int { return cmp.Compare(a.Version, b.Version) })
	return out, err
}

func state(e *auditv1.Event) (State, error) {
	s := State{Received: e.RequestReceivedTimestamp.Time, Ended: e.StageTimestamp.Time, owned: map[string]sharding.Scope{}}
	var object meshv1alpha1.ShardingConfig
	if err := json.Unmarshal(e.ResponseObject.Raw, &object); err != nil {
		return s, fmt.Errorf("reading a root: %w", err)
	}
	var err error
	if s.Version, err = strconv.ParseUint(object.ResourceVersion, 10, 64); err != nil {
		return s, fmt.Errorf("reading the version of a root: %w", err)
	}
	if object.Status.Root == nil {
		return s, nil
	}
	s.Root = *object.Status.Root
	for _, shard := range s.Root.Shards {
		if s.owned[shard.Name], err = sharding.Parse(shard.Held); err != nil {
			return s, fmt.Errorf("reading the scope of %s: %w", shard.Name, err)
		}
	}
	return s, nil
}

// Owner returns the shard that owns a key, "" if none does.
func (s State) Owner(key string) string {
	for shard, owned := range s.owned {
		if owned.Owns(key) {
			return shard
		}
	}
	return ""
}

// Shared describes two shards that own the same keys, "" if there are none.
func (s State) Shared() string {
	for i, a := range s.Root.Shards {
		for _, b := range s.Root.Shards[i+1:] {
			if both := s.owned[a.Name].Intersect(s.owned[b.Name]); !both.Empty() {
				return fmt.Sprintf("%s: %s and %s both own %s", s.Received.UTC().Format(time.RFC3339Nano), a.Name, b.Name, both)
			}
		}
	}
	return ""
}
