package push

import (
	"k8s.io/apimachinery/pkg/util/validation"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

// usage returns what a pod requested, as reported, bounded; nil if nothing was. It omits names that no
// resource, namespace or object can have.
func usage(reported *meshv1.Usage) *meshv1.Usage {
	if reported == nil {
		return nil
	}
	out := &meshv1.Usage{
		SinceMs: reported.GetSinceMs(), LastMs: reported.GetLastMs(),
		Requests: min(reported.GetRequests(), maxWrites), Forbidden: min(reported.GetForbidden(), maxWrites),
	}
	namespaces, objects := meshv1.MaxUsageNamespaces, meshv1.MaxUsageObjects
	for _, r := range reported.GetResources()[:min(len(reported.GetResources()), meshv1.MaxUsageResources)] {
		if !namesResource(r.GetGroup(), r.GetResource()) {
			continue
		}
		one := &meshv1.ResourceUsage{
			Group: r.GetGroup(), Resource: r.GetResource(), All: r.GetAll(), Reads: min(r.GetReads(), maxWrites),
			Writes: min(r.GetWrites(), maxWrites), Conflicts: min(r.GetConflicts(), maxWrites), OtherWrites: min(r.GetOtherWrites(), maxWrites),
		}
		for _, n := range r.GetNamespaces()[:min(len(r.GetNamespaces()), namespaces)] {
			if namesNamespace(n.GetNamespace()) {
				one.Namespaces = append(one.Namespaces, &meshv1.NamespaceWrites{Namespace: n.GetNamespace(), Writes: min(n.GetWrites(), maxWrites)})
			}
		}
		for _, o := range r.GetObjects()[:min(len(r.GetObjects()), objects)] {
			if namesNamespace(o.GetNamespace()) && namesObject(o.GetName()) {
				one.Objects = append(one.Objects, &meshv1.ObjectWrites{Namespace: o.GetNamespace(), Name: o.GetName(), Writes: min(o.GetWrites(), maxWrites)})
			}
		}
		namespaces -= len(one.GetNamespaces())
		objects -= len(one.GetObjects())
		out.Resources = append(out.Resources, one)
	}
	return out
}

func namesNamespace(name string) bool { return name == "" || len(validation.IsDNS1123Label(name)) == 0 }

// namesObject reports whether an object can have a name. That of an object of RBAC may be no DNS name.
func namesObject(name string) bool {
	return name != "" && len(name) <= validation.DNS1123SubdomainMaxLength && fieldPath(name) == name
}
