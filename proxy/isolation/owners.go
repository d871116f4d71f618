package isolation

import (
	"sync"

	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
)

// owners are the scopes of all shards. They are decoded for the first refusal.
type owners struct {
	once   sync.Once
	shards []shardScope
}

type shardScope struct {
	name  string
	owned sharding.Scope
}

// Owner returns a message about the owner of a key; the key is empty if it is not known.
func (d *Division) Owner(key string) string {
	d.owners.once.Do(func() {
		for _, m := range d.message.GetOwners() {
			if owned, err := sharding.FromProto(m.GetScope()); err == nil {
				d.owners.shards = append(d.owners.shards, shardScope{m.GetShard(), owned})
			}
		}
	})
	if key == "" || len(d.owners.shards) == 0 {
		return "another shard owns it"
	}
	for _, s := range d.owners.shards {
		if s.name != d.message.GetShard() && s.owned.Owns(key) { // what it owns itself, it is releasing
			return "shard " + s.name + " owns it"
		}
	}
	return "no shard owns it at the moment"
}
