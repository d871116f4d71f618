package push

import (
	"strings"
	"unicode"

	"k8s.io/apimachinery/pkg/util/validation"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/manager/internal/text"
)

// Shadow counts the writes of a shadow since its agent serves it, as v1alpha1.ShadowStatus does.
type Shadow struct {
	Agreed, Differed, Refused, Uncompared uint64
	Differences                           []ShadowDifference
}

// ShadowDifference is what writes of a shadow would have changed, and nobody did.
type ShadowDifference struct {
	Group, Resource, Verb string
	Fields                []string
	Writes                uint64
}

// shadow returns the reported counts of a shadow, bounded; nil if there are none. It omits
// differences of resources with names that no resource can have.
func shadow(reported *meshv1.ShadowReport) *Shadow {
	if reported == nil {
		return nil
	}
	out := &Shadow{
		Agreed: min(reported.GetAgreed(), maxWrites), Differed: min(reported.GetDiffered(), maxWrites),
		Refused: min(reported.GetRefused(), maxWrites), Uncompared: min(reported.GetUncompared(), maxWrites),
	}
	for _, d := range reported.GetDifferences()[:min(len(reported.GetDifferences()), meshv1.MaxShadowDifferences)] {
		resource, subresource, _ := strings.Cut(d.GetResource(), "/")
		if !text.NamesResource(d.GetGroup(), resource) ||
			subresource != "" && len(validation.IsDNS1123Label(subresource)) > 0 || len(validation.IsDNS1123Label(d.GetVerb())) > 0 {
			continue
		}
		one := ShadowDifference{Group: d.GetGroup(), Resource: d.GetResource(), Verb: d.GetVerb(), Writes: min(d.GetWrites(), maxWrites)}
		for _, f := range d.GetFields()[:min(len(d.GetFields()), meshv1.MaxShadowFields)] {
			one.Fields = append(one.Fields, fieldPath(f))
		}
		out.Differences = append(out.Differences, one)
	}
	return out
}

// fieldPath returns the path of a field, bounded, without characters that do not print.
func fieldPath(path string) string {
	path = strings.ToValidUTF8(path[:min(len(path), meshv1.MaxFieldPath)], "")
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return -1
		}
		return r
	}, path)
}
