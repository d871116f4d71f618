{{/* ctrlmesh.image names an image: by its digest if there is one, otherwise by its tag. */}}
{{- define "ctrlmesh.image" -}}
{{- $all := index . 0 }}{{ $one := index . 1 -}}
{{- $all.registry }}/{{ $one.repository }}{{ with $one.digest }}@{{ . }}{{ else }}:{{ $all.tag }}{{ end }}
{{- end }}

{{- define "ctrlmesh.pullSecrets" }}
{{- with .Values.image.pullSecrets }}
      imagePullSecrets:
      {{- range . }}
      - name: {{ . }}
      {{- end }}
{{- end }}
{{- end }}
