{{- define "pointsman.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 53 | trimSuffix "-" }}
{{- end }}

{{- define "pointsman.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride }}
{{- else if contains (include "pointsman.name" .) .Release.Name }}
{{- .Release.Name | trunc 53 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "pointsman.name" .) | trunc 53 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "pointsman.selectorLabels" -}}
app.kubernetes.io/name: {{ include "pointsman.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "pointsman.labels" -}}
{{ include "pointsman.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "pointsman.image" -}}
{{- $tag := .Values.image.tag | default (printf "%s-%s" .Chart.AppVersion .Values.image.target) }}
{{- printf "%s:%s" .Values.image.repository $tag }}
{{- end }}

{{- define "pointsman.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- .Values.serviceAccount.name | default (include "pointsman.fullname" .) }}
{{- else }}
{{- .Values.serviceAccount.name | default "default" }}
{{- end }}
{{- end }}

{{- /* The Secret that holds api-keys; empty where anybody may come. */}}
{{- define "pointsman.secretName" -}}
{{- if .Values.auth.existingSecret }}
{{- .Values.auth.existingSecret }}
{{- else if .Values.auth.keys }}
{{- include "pointsman.fullname" . }}
{{- else if not .Values.auth.insecure }}
{{- fail "Nobody could use this server, or everybody: set auth.keys or auth.existingSecret, or accept it with auth.insecure=true." }}
{{- end }}
{{- end }}

{{- /* What Prometheus must show to read /metrics, if anything. */}}
{{- define "pointsman.hasMetricsKey" -}}
{{- if or .Values.auth.existingSecret (and .Values.auth.keys .Values.auth.metricsKey) }}yes{{ end }}
{{- end }}

{{- define "pointsman.scheme" -}}
{{- ternary "HTTPS" "HTTP" (ne .Values.tls.secretName "") }}
{{- end }}
