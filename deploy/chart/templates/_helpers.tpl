{{/* ctrlmesh.image names an image, by its tag and its digest if there is one: the tag shows the version. */}}
{{- define "ctrlmesh.image" -}}
{{- $all := index . 0 }}{{ $one := index . 1 -}}
{{- $all.registry }}/{{ $one.repository }}{{ with $all.tag }}:{{ . }}{{ end }}{{ with $one.digest }}@{{ . }}{{ end }}
{{- end }}

{{- define "ctrlmesh.pullSecrets" }}
{{- with .Values.image.pullSecrets }}
      imagePullSecrets:
      {{- range . }}
      - name: {{ . }}
      {{- end }}
{{- end }}
{{- end }}
