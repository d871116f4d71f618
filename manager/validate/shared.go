package validate

import (
	"strings"

	"k8s.io/apimachinery/pkg/api/validate/content"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

// sharedObjects returns the errors of the objects that every shard reads.
func sharedObjects(in []v1alpha1.SharedObjects, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	for i, o := range in {
		at := at.Index(i)
		errs = append(errs, names(o.APIGroups, at.Child("apiGroups"), apiGroup)...)
		errs = append(errs, names(o.Resources, at.Child("resources"), func(v string) string {
			if v == "*" {
				return ""
			}
			return resourceName(v)
		})...)
		errs = append(errs, objectNames(o.Namespaces, at.Child("namespaces"), validation.IsDNS1123Label)...)
		errs = append(errs, objectNames(o.Names, at.Child("names"), content.IsPathSegmentName)...)
	}
	return errs
}

// objectNames returns errors for texts that cannot be names of objects.
func objectNames(values []string, at *field.Path, check func(string) []string) field.ErrorList {
	var errs field.ErrorList
	for i, v := range values {
		problems := check(v)
		switch {
		case v == "*":
			problems = []string{"leave the list empty for all"}
		case v == "" || len(v) > validation.DNS1123SubdomainMaxLength:
			problems = []string{"not the name of an object"}
		}
		if len(problems) > 0 {
			errs = append(errs, field.Invalid(at.Index(i), v, strings.Join(problems, "; ")))
		}
	}
	return errs
}

// apiGroup returns the error of the name of an API group; empty if it is valid.
func apiGroup(v string) string {
	if v == "" || v == "*" { // the core group, or all
		return ""
	}
	return strings.Join(validation.IsDNS1123Subdomain(v), "; ")
}

// resourceName returns the error of the plural name of a resource; empty if it is valid.
func resourceName(v string) string {
	if base, _, sub := strings.Cut(v, "/"); sub {
		return "subresources follow their resource: write " + base
	}
	return strings.Join(validation.IsDNS1035Label(v), "; ")
}
