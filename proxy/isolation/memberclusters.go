package isolation

import meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"

// DividesMemberClusters reports whether requests into member clusters are divided as those of the
// apiserver's own cluster are: by namespace, which belongs to the same shard in all clusters. Else
// MemberClusters decides.
func (d *Division) DividesMemberClusters() bool { return d.by == ByNamespace }

// MemberClusters decides on requests into member clusters. All of them belong to the owner of the name of
// the cluster.
type MemberClusters struct {
	Border
	// Observe: requests into clusters of other shards are counted, not refused.
	Observe bool
	// Standby: the shard owns no cluster yet.
	Standby bool
}

// MemberClusters returns nil if every shard may send requests into all clusters.
func (d *Division) MemberClusters() *MemberClusters { return d.memberClusters }

func (d *Division) compileMemberClusters() *MemberClusters {
	owned, divided := d.owned()
	isolation := d.message.GetIsolation()
	if d.by != ByName || !divided || owned.Everything() || !d.Standby && isolation == meshv1.Isolation_ISOLATION_OFF {
		return nil
	}
	return &MemberClusters{
		Border: Border{owned: owned}, Standby: d.Standby,
		Observe: !d.Standby && isolation == meshv1.Isolation_ISOLATION_OBSERVE,
	}
}

// Refuses reports whether requests into a cluster are refused.
func (m *MemberClusters) Refuses(cluster string) bool {
	return m != nil && !m.Observe && m.Foreign(cluster)
}

// GainsCluster reports whether the shard did not own a cluster under the division before.
func (d *Division) GainsCluster(before *Division, cluster string) bool {
	had, divided := before.owned()
	return divided && before.by == ByName && !had.Owns(cluster)
}
