package check

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	kridge "github.com/ctrlmesh/ctrlmesh/api/kridge/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/lint"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/report"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/snapshot"
	"github.com/ctrlmesh/ctrlmesh/internal/crdschema"
)

// docsCheck is about what the command prints.
const docsCheck = "docs/commands.md#check"

// RunUpgrade checks whether a mesh can be upgraded to a version, which is that of this program. It reads
// snapshot.Applied besides Parts.
func RunUpgrade(ctx context.Context, s *snapshot.Snapshot, version string) (Report, error) {
	var f findings
	f.unread(s)
	f.kubernetes(s)
	f.skew(s, version)
	f.stored(s)
	f.unsettled(s)
	accepted, err := f.refused(ctx, s)
	if err != nil {
		return Report{}, err
	}
	return f.report(fmt.Sprintf("%s can be upgraded to %s, whose admission accepts the objects (%d)", strings.Join(report.Versions(s, snapshot.Manager), ", "), version, accepted)), nil
}

// skew checks that the mesh is of this version or the one before.
func (f *findings) skew(s *snapshot.Snapshot, version string) {
	to, ok := minor(version)
	if !ok {
		f.add(Warning, "version-skew", docsUpgrade, "use the plugin of the release to which you upgrade", "the version of this program, %q, is not that of a release", version)
		return
	}
	for _, program := range []string{snapshot.Manager, snapshot.Agent} {
		for _, is := range report.Versions(s, program) {
			from, ok := minor(is)
			switch {
			case !ok:
				f.add(Warning, "version-skew", docsUpgrade, "compare the releases yourself: versions that work together are adjacent", "the version of %s, %q, is not that of a release", program, is)
			case from[0] != to[0] || to[1]-from[1] > 1:
				f.add(Error, "version-skew", docsUpgrade, fmt.Sprintf("upgrade to v%d.%d first", from[0], from[1]+1), "%s runs %s, and %s works together with the version before it alone", program, is, version)
			case slices.Compare(from[:], to[:]) > 0:
				f.add(Error, "version-skew", docsUpgrade, "use the plugin of the version to which you upgrade", "%s runs %s, which is newer than %s", program, is, version)
			}
		}
	}
}

// stored checks that the new definitions serve the versions in which objects are stored.
func (f *findings) stored(s *snapshot.Snapshot) {
	for _, file := range definitions(true) {
		is, ok := s.Install.Definitions[definitionName(file)]
		if !ok {
			continue
		}
		want, err := crdschema.Definition(file)
		if err != nil {
			f.add(Unknown, "version-stored", docsUpgrade, "report it as a bug", "%v", err)
			continue
		}
		for _, version := range is.Status.StoredVersions {
			if version != want.Spec.Versions[0].Name {
				f.add(Error, "version-stored", docsUpgrade, "migrate the stored objects, and remove the version from status.storedVersions", "objects of %s may be stored in version %s, which the new definition lacks", is.Name, version)
			}
		}
	}
}

// unsettled checks that the mesh works: an upgrade amid a handover prolongs it.
func (f *findings) unsettled(s *snapshot.Snapshot) {
	is := Run(s)
	ids := map[string]bool{}
	for _, one := range is.Findings {
		if one.Severity == Error && one.ID != "crd-old" && one.ID != "crd-missing" {
			ids[one.ID] = true
		}
	}
	if len(ids) > 0 {
		f.add(Error, "mesh-unhealthy", docsCheck, "solve what kubectl ctrlmesh check says first", "the mesh has problems already: %s", strings.Join(slices.Sorted(maps.Keys(ids)), ", "))
	}
}

// refused checks that admission of the new version accepts the objects that there are, and returns how
// many it checked.
func (f *findings) refused(ctx context.Context, s *snapshot.Snapshot) (checked int, err error) {
	var documents []lint.Document
	if s.Mesh.Settings != nil {
		settings, err := runtime.DefaultUnstructuredConverter.ToUnstructured(s.Mesh.Settings)
		if err != nil {
			return 0, fmt.Errorf("reading the settings of the mesh: %w", err)
		}
		o := &unstructured.Unstructured{Object: settings}
		o.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("ConfigMap"))
		documents = append(documents, lint.Document{File: s.Namespace, Objects: []*unstructured.Unstructured{o}})
	}
	for _, o := range s.Subjects.Applied {
		derived := cmp.Or(o.GetLabels()[v1alpha1.RootLabel], o.GetLabels()[kridge.RootLabel]) != ""
		if lint.Checks(o.GroupVersionKind()) && !derived {
			documents = append(documents, lint.Document{File: o.GetNamespace(), Objects: []*unstructured.Unstructured{o.DeepCopy()}})
		}
	}
	is, err := lint.Run(ctx, documents, "", s.Namespace)
	if err != nil {
		return 0, fmt.Errorf("checking the objects: %w", err)
	}
	for _, p := range is.Problems {
		if p.Level == lint.Refused {
			f.add(Error, "object-refused", docsUpgrade, "correct it before the upgrade: later, no change of it is accepted otherwise", "%s %s/%s: %s", p.Kind, p.File, p.Name, p.Text())
		}
	}
	return is.Checked, nil
}
