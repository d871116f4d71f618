{{- define "text" }}{{ . | trim | replace "\n" " " | replace "|" "\\|" }}{{ end -}}
{{- define "type_members" -}}
{{- if eq .Name "metadata" -}}
Metadata of the object.
{{- else -}}
{{ template "text" .Doc }}
{{- end -}}
{{- with .Default }} Default: `{{ . }}`.{{ end -}}
{{- range .Validation }}{{ if not (hasPrefix "Optional" .) }} {{ . | trim | replace "|" "\\|" }}.{{ end }}{{ end -}}
{{- end -}}
