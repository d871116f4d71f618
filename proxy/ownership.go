package proxy

import (
	"net/http"
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/proxy/status"
)

// ownership knows which shard owns a key. It is decoded when a request is refused for
// the first time.
type ownership struct {
	once   sync.Once
	shards []shardScope
}

type shardScope struct {
	name  string
	owned sharding.Scope
}

// owner says who owns a key, for people.
func (o *ownership) owner(owners []*meshv1.Owner, key string) string {
	o.once.Do(func() {
		for _, m := range owners {
			if owned, err := sharding.FromProto(m.GetScope()); err == nil {
				o.shards = append(o.shards, shardScope{m.GetShard(), owned})
			}
		}
	})
	if key == "" || len(o.shards) == 0 {
		return "another shard owns it"
	}
	for _, s := range o.shards {
		if s.owned.Owns(key) {
			return "shard " + s.name + " owns it"
		}
	}
	return "no shard owns it at the moment"
}

// forbidden refuses a request for what another shard owns. The key is empty if it is
// not known.
func (x *exchange) forbidden(what, key string) *outcome {
	resource := x.req.info.Resource
	if x.req.info.Subresource != "" {
		resource += "/" + x.req.info.Subresource
	}
	refused := status.New(http.StatusForbidden, metav1.StatusReasonForbidden, 0,
		"%s %s: %s does not belong to this pod's shard, ShardingConfig %s/%s: %s",
		x.req.info.Verb, resource, what, x.pod.info.Namespace, x.policy.shard, x.policy.ownership.owner(x.policy.message.GetSharding().GetOwners(), key))
	refused.ErrStatus.Details = &metav1.StatusDetails{Name: x.req.info.Name, Group: x.req.info.APIGroup, Kind: x.req.info.Resource}
	return refusalBy("foreign", refused)
}
