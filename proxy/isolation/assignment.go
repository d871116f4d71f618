package isolation

import meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"

// Assignment is what assigns the objects of a resource to shards.
type Assignment int

// Values of Assignment.
const (
	ByNamespace Assignment = iota
	ByName                 // of namespaces and clusters: their own
	ByUID
)

func assignmentOf(k meshv1.Key) Assignment {
	switch k {
	case meshv1.Key_KEY_CLUSTER:
		return ByName
	case meshv1.Key_KEY_OBJECT:
		return ByUID
	}
	return ByNamespace
}

// key returns the key of the object that a path names; empty if the path does not show it.
func (a Assignment) key(namespace, name string) string {
	return [...]string{ByNamespace: namespace, ByName: name, ByUID: ""}[a]
}

// field returns the field of objects that a shardSelector selects by; "" is none.
func (a Assignment) field() string {
	return [...]string{ByNamespace: "object.metadata.namespace", ByName: "", ByUID: "object.metadata.uid"}[a]
}
