package proxy

import (
	"net/http"
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	apirequest "k8s.io/apiserver/pkg/endpoints/request"

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
func (p *policy) forbidden(info *apirequest.RequestInfo, what, key string) *outcome {
	resource := info.Resource
	if info.Subresource != "" {
		resource += "/" + info.Subresource
	}
	refused := status.New(http.StatusForbidden, metav1.StatusReasonForbidden, 0,
		"%s %s: %s does not belong to this pod's shard, ShardingConfig %s/%s: %s",
		info.Verb, resource, what, p.pod.info.Namespace, p.shard, p.ownership.owner(p.message.GetSharding().GetOwners(), key))
	refused.ErrStatus.Details = &metav1.StatusDetails{Name: info.Name, Group: info.APIGroup, Kind: info.Resource}
	return refusalBy("foreign", refused)
}
