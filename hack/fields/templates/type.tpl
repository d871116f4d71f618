{{- define "type" -}}
{{- if markdownShouldRenderType . }}
## {{ .Name }}

{{ .Doc | trim }}
{{ if .References }}
Used by {{ range $i, $t := .SortedReferences }}{{ if $i }}, {{ end }}{{ markdownRenderTypeLink $t }}{{ end }}.
{{ end }}
{{- if .EnumValues }}
| value | |
|---|---|
{{ range .EnumValues -}}
| `{{ .Name }}` | {{ template "text" .Doc }} |
{{ end -}}
{{ end }}
{{- if .Members }}
| field | type | |
|---|---|---|
{{ range .Members -}}
| `{{ .Name }}` | {{ markdownRenderType .Type }} | {{ template "type_members" . }} |
{{ end -}}
{{ end }}
{{- end }}
{{- end -}}
