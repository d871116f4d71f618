// Package lint says what admission would say about objects of the mesh's kinds in files. It is pure:
// it asks no apiserver, and knows no other objects than those of the files.
package lint

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strings"

	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	kruise "github.com/ctrlmesh/ctrlmesh/api/kruise/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/render"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/snapshot"
	"github.com/ctrlmesh/ctrlmesh/internal/crdschema"
	"github.com/ctrlmesh/ctrlmesh/manager/origin"
	"github.com/ctrlmesh/ctrlmesh/manager/platform"
)

// Level is whether admission refuses an object for a problem.
type Level string

// Levels.
const (
	// Refused: the apiserver refuses the object.
	Refused Level = "error"
	// Warned: the apiserver accepts the object with a warning.
	Warned Level = "warning"
)

// Problem is what admission says about an object.
type Problem struct {
	Level Level  `json:"level"`
	File  string `json:"file"`
	// Document counts from 1.
	Document int    `json:"document"`
	Kind     string `json:"kind,omitempty"`
	Name     string `json:"name,omitempty"`
	// Field is the path of the field; empty if the problem is about the whole object.
	Field   string `json:"field,omitempty"`
	Message string `json:"message"`
}

// Text returns the message, with the field.
func (p Problem) Text() string { return strings.TrimPrefix(p.Field+": "+p.Message, ": ") }

// Report is the result of lint.
type Report struct {
	Problems []Problem `json:"problems"`
	// Checked is the number of objects of the mesh's kinds.
	Checked int `json:"checked"`
}

// Refusals reports whether admission refuses an object.
func (r Report) Refusals() bool {
	return slices.ContainsFunc(r.Problems, func(p Problem) bool { return p.Level == Refused })
}

// WriteText implements render.Report.
func (r Report) WriteText(t *render.Text) {
	for _, p := range r.Problems {
		about := ""
		if p.Kind != "" {
			about = fmt.Sprintf(" (%s %s)", p.Kind, cmp.Or(p.Name, "without name"))
		}
		t.Line("%s: document %d%s: %s: %s", p.File, p.Document, about, p.Level, p.Text())
	}
	if len(r.Problems) == 0 {
		t.Line("no problems found; objects checked: %d", r.Checked)
	}
}

// manager is a user that no author of a file is: it alone may write derived shards.
const manager = "system:serviceaccount:ctrlmesh-system:ctrlmesh-manager"

// linter checks objects in the order in which they are applied.
type linter struct {
	Report
	namespace string // of objects without one
	mesh      string // namespace of the mesh
	schemas   map[schema.GroupVersionKind]*crdschema.Schema
	settings  *platform.Settings
	applied   objects
}

// Run checks documents. Objects without namespace are in the one given.
func Run(ctx context.Context, documents []Document, namespace, mesh string) (Report, error) {
	l := &linter{Report: Report{Problems: []Problem{}}, namespace: namespace, mesh: mesh, schemas: map[schema.GroupVersionKind]*crdschema.Schema{}, settings: platform.Default()}
	for _, d := range documents {
		l.prepare(d)
	}
	for _, d := range documents {
		if err := l.document(ctx, d); err != nil {
			return l.Report, err
		}
	}
	return l.Report, nil
}

// Checks reports whether admission checks objects of a kind.
func Checks(gvk schema.GroupVersionKind) bool {
	_, ok := kinds[gvk]
	return ok
}

// prepare reads settings, which apply to all documents, and what TrafficPolicies refer to.
func (l *linter) prepare(d Document) {
	for _, o := range d.Objects {
		switch gvk := o.GroupVersionKind(); {
		case gvk == corev1.SchemeGroupVersion.WithKind("ConfigMap") && o.GetName() == platform.ConfigMap:
			data, _, _ := unstructured.NestedStringMap(o.Object, "data")
			settings, err := platform.Parse(data)
			if err != nil {
				l.add(Refused, d, o, "data", err.Error())
				continue
			}
			l.settings = settings
		case gvk == origin.VirtualApp:
			app := kruise.VirtualApp{}
			if raw, err := o.MarshalJSON(); err == nil && json.Unmarshal(raw, &app) == nil { // its own problems are reported later
				app.Namespace = cmp.Or(app.Namespace, l.namespace)
				l.applied.apps = append(l.applied.apps, app)
			}
		}
	}
}

func (l *linter) document(ctx context.Context, d Document) error {
	if d.Err != nil {
		l.add(Refused, d, nil, "", "parsing YAML: "+d.Err.Error())
	}
	for _, o := range d.Objects {
		gvk := o.GroupVersionKind()
		k, known := kinds[gvk]
		switch {
		case known:
			l.Checked++
			if err := l.object(ctx, d, o, k); err != nil {
				return err
			}
		case slices.Contains(snapshot.Groups, gvk.Group):
			l.Checked++
			l.add(Refused, d, o, "", fmt.Sprintf("the mesh has no kind %s in %s", gvk.Kind, gvk.GroupVersion()))
		}
	}
	return nil
}

// object checks an object by its schema, and then as the webhooks do.
func (l *linter) object(ctx context.Context, d Document, o *unstructured.Unstructured, k kind) error {
	before := len(l.Problems)
	if o.GetNamespace() == "" {
		o.SetNamespace(l.namespace)
	}
	if o.GetName() == "" && o.GetGenerateName() == "" {
		l.add(Refused, d, o, "metadata.name", "Required value: name the object")
	}
	for _, problem := range validation.IsDNS1123Subdomain(cmp.Or(o.GetName(), "none")) {
		l.add(Refused, d, o, "metadata.name", problem)
	}
	gvk := o.GroupVersionKind()
	if l.schemas[gvk] == nil {
		s, err := crdschema.Load(k.definition)
		if err != nil {
			return err
		}
		l.schemas[gvk] = s
	}
	unknown, errs := l.schemas[gvk].Admit(o.Object)
	for _, path := range unknown {
		l.add(Refused, d, o, path, "unknown field")
	}
	l.fields(d, o, errs)
	if len(l.Problems) > before {
		return nil
	}
	return l.admit(ctx, d, o, k)
}

func (l *linter) fields(d Document, o *unstructured.Unstructured, errs field.ErrorList) {
	for _, err := range errs {
		l.add(Refused, d, o, err.Field, err.ErrorBody())
	}
}

// admit asks the webhooks of the manager.
func (l *linter) admit(ctx context.Context, d Document, o *unstructured.Unstructured, k kind) error {
	raw, err := o.MarshalJSON()
	if err != nil {
		return fmt.Errorf("encoding %s %s: %w", o.GetKind(), o.GetName(), err)
	}
	config, errs, err := k.read(o.GroupVersionKind(), o.GetNamespace(), raw)
	if err != nil {
		l.add(Refused, d, o, "", err.Error())
		return nil
	}
	if l.fields(d, o, errs); len(errs) == 0 {
		l.review(ctx, d, o, raw, k)
	}
	if config != nil {
		l.applied.configs = append(l.applied.configs, *config)
	}
	return nil
}

// review adds the answer of a webhook, which knows the objects that were applied before.
func (l *linter) review(ctx context.Context, d Document, o *unstructured.Unstructured, raw []byte, k kind) {
	req := admission.Request{AdmissionRequest: admissionv1.AdmissionRequest{Operation: admissionv1.Create, Namespace: o.GetNamespace(), Name: o.GetName()}}
	gvk := o.GroupVersionKind()
	req.Kind.Group, req.Kind.Version, req.Kind.Kind = gvk.Group, gvk.Version, gvk.Kind
	req.Object.Raw = raw
	r := k.webhook(l).Handle(ctx, req)
	for _, w := range r.Warnings {
		path, message := split(w)
		l.add(Warned, d, o, path, message)
	}
	if !r.Allowed && r.Result != nil {
		path, message := split(r.Result.Message)
		l.add(Refused, d, o, path, message)
	}
}

// leading is the path of a field at the beginning of a message.
var leading = regexp.MustCompile(`^((?:spec|metadata)[a-zA-Z0-9_.\[\]]*): `)

// split returns the field that a message begins with.
func split(message string) (path, rest string) {
	if m := leading.FindStringSubmatch(message); m != nil {
		return m[1], strings.TrimPrefix(message, m[0])
	}
	return "", message
}

func (l *linter) add(level Level, d Document, o *unstructured.Unstructured, path, message string) {
	p := Problem{Level: level, File: d.File, Document: d.Number, Field: path, Message: message}
	if o != nil {
		p.Kind, p.Name = o.GetKind(), o.GetName()
	}
	l.Problems = append(l.Problems, p)
}
