{{- define "gvList" -}}
<!-- Written from api/ctrlmesh/v1alpha1 by make generate. Do not edit. -->
# Fields

With this page you look up a field of a custom resource: its type, its default and its bounds. `kubectl explain` has the same texts. [Dialects](dialects.md) lists the kinds of the ancestors.

{{ range . }}{{ template "gvDetails" . }}{{ end }}
{{- end -}}
