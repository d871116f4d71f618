package usage

import (
	"strings"
	"unicode"
	"unicode/utf8"

	"k8s.io/apimachinery/pkg/util/validation"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/manager/internal/text"
)

// maxCount bounds a count, so that sums of them do not overflow.
const maxCount = 1 << 40

// Bounded returns what a pod requested, as an agent or a tenant says, bounded; nil if nothing was. It omits
// names that no resource, namespace or object can have.
func Bounded(reported *meshv1.Usage) *meshv1.Usage {
	if reported == nil {
		return nil
	}
	out := &meshv1.Usage{
		SinceMs: reported.GetSinceMs(), LastMs: reported.GetLastMs(),
		Requests: min(reported.GetRequests(), maxCount), Forbidden: min(reported.GetForbidden(), maxCount),
	}
	namespaces, objects, cross := meshv1.MaxUsageNamespaces, meshv1.MaxUsageObjects, meshv1.MaxUsageCross
	for _, r := range reported.GetResources()[:min(len(reported.GetResources()), meshv1.MaxUsageResources)] {
		if !text.NamesResource(r.GetGroup(), r.GetResource()) {
			continue
		}
		one := &meshv1.ResourceUsage{
			Group: r.GetGroup(), Resource: r.GetResource(), All: r.GetAll(), Reads: min(r.GetReads(), maxCount),
			Writes: min(r.GetWrites(), maxCount), Conflicts: min(r.GetConflicts(), maxCount), OtherWrites: min(r.GetOtherWrites(), maxCount),
			Bytes: min(r.GetBytes(), maxCount), Events: min(r.GetEvents(), maxCount), Indivisible: r.GetIndivisible(),
		}
		for _, n := range r.GetNamespaces()[:min(len(r.GetNamespaces()), namespaces)] {
			if namesNamespace(n.GetNamespace()) {
				one.Namespaces = append(one.Namespaces, &meshv1.NamespaceWrites{Namespace: n.GetNamespace(), Writes: min(n.GetWrites(), maxCount)})
			}
		}
		for _, o := range r.GetObjects()[:min(len(r.GetObjects()), objects)] {
			if namesNamespace(o.GetNamespace()) && namesObject(o.GetName()) {
				one.Objects = append(one.Objects, &meshv1.ObjectWrites{Namespace: o.GetNamespace(), Name: o.GetName(), Writes: min(o.GetWrites(), maxCount)})
			}
		}
		for _, c := range r.GetCross()[:min(len(r.GetCross()), cross)] {
			if namesNamespace(c.GetNamespace()) && text.NamesResource(c.GetCauseGroup(), c.GetCauseResource()) {
				one.Cross = append(one.Cross, &meshv1.CrossWrites{
					Namespace: c.GetNamespace(), CauseGroup: c.GetCauseGroup(), CauseResource: c.GetCauseResource(), Writes: min(c.GetWrites(), maxCount),
				})
			}
		}
		cross -= len(one.GetCross())
		namespaces -= len(one.GetNamespaces())
		objects -= len(one.GetObjects())
		out.Resources = append(out.Resources, one)
	}
	return out
}

func namesNamespace(name string) bool { return name == "" || len(validation.IsDNS1123Label(name)) == 0 }

// namesObject reports whether an object can have a name. That of an object of RBAC may be no DNS name.
func namesObject(name string) bool {
	return name != "" && len(name) <= validation.DNS1123SubdomainMaxLength && utf8.ValidString(name) &&
		!strings.ContainsFunc(name, func(r rune) bool { return !unicode.IsPrint(r) })
}
