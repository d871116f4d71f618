{{- define "gvDetails" -}}
The kinds of `{{ .GroupVersionString }}` are:
{{ range .SortedKinds }}
* {{ $.TypeForKind . | markdownRenderTypeLink }}
{{- end }}
{{ range .SortedTypes }}{{ template "type" . }}{{ end }}
{{- end -}}
