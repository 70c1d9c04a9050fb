{{- define "testbed.nodes" -}}
{{- div (int .Values.workload.gpus) 8 -}}
{{- end -}}

{{/* The first pod, by the name that the others know it by. */}}
{{- define "testbed.first" -}}
{{- if eq .Values.workload.controller "jobset" -}}
{{ .Release.Name }}-workload-0-0.{{ .Release.Name }}
{{- else -}}
{{ .Release.Name }}-0.{{ .Release.Name }}
{{- end -}}
{{- end -}}

{{/* With %d for its number, the name of any. */}}
{{- define "testbed.name" -}}
{{- if eq .Values.workload.controller "jobset" -}}
{{ .Release.Name }}-workload-0-%d.{{ .Release.Name }}
{{- else -}}
{{ .Release.Name }}-%d.{{ .Release.Name }}
{{- end -}}
{{- end -}}

{{- define "testbed.labels" -}}
app.kubernetes.io/name: deep-ep-testbed
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* What a schema cannot say. */}}
{{- define "testbed.check" -}}
{{- if not .Values.image }}{{ fail "image is missing: --set image=REGISTRY/PATH@sha256:DIGEST" }}{{ end -}}
{{- if and (eq .Values.results.kind "claim") (not .Values.results.claim) }}{{ fail "results.kind is claim, and results.claim names none" }}{{ end -}}
{{- if and (eq .Values.results.kind "bucket") (not .Values.results.bucket) }}{{ fail "results.kind is bucket, and results.bucket names none" }}{{ end -}}
{{- if and (eq .Values.results.kind "bucket") (not .Values.workload.serviceAccount) }}{{ fail "results.kind is bucket, and workload.serviceAccount names none: which account may write the bucket?" }}{{ end -}}
{{- if and (eq .Values.network.mode "interfaces") (not .Values.network.networks) }}{{ fail "network.mode is interfaces, and network.networks is empty" }}{{ end -}}
{{- if gt (len .Release.Name) 40 }}{{ fail (printf "the release's name %s is too long for names of pods: at most 40 letters" .Release.Name) }}{{ end -}}
{{- end -}}

{{/*
An Indexed Job's specification: a JobSet's, or a Job's own. A pod that fails is not started again, and does not make the
controller delete the others: all end by themselves, and their logs stay. So does the pods' deadline, which comes before the
Job's.
*/}}
{{- define "testbed.job" -}}
completionMode: Indexed
parallelism: {{ include "testbed.nodes" . }}
completions: {{ include "testbed.nodes" . }}
backoffLimitPerIndex: 0
activeDeadlineSeconds: {{ int .Values.workload.deadlineSeconds }}
template:
  metadata:
    labels:
      {{- include "testbed.labels" . | nindent 6 }}
      deep-ep/uses-gpus: "true"
    {{- $annotations := include "testbed.annotations" . }}
    {{- if $annotations }}
    annotations:
      {{- $annotations | nindent 6 }}
    {{- end }}
  spec:
    {{- include "testbed.pod" . | nindent 4 }}
{{- end -}}

{{- define "testbed.annotations" -}}
{{- if eq .Values.network.mode "interfaces" }}
networking.gke.io/default-interface: eth0
networking.gke.io/interfaces: |
  [
    {"interfaceName": "eth0", "network": "default"}
    {{- range $index, $network := .Values.network.networks }},
    {"interfaceName": "eth{{ add $index 1 }}", "network": {{ $network | quote }}}
    {{- end }}
  ]
{{- end }}
{{- if and .Values.queue (ne .Values.topology.mode "none") }}
kueue.x-k8s.io/podset-{{ .Values.topology.mode }}-topology: {{ .Values.topology.level }}
{{- end }}
{{- if eq .Values.results.kind "bucket" }}
gke-gcsfuse/volumes: "true"
{{- end }}
{{- end -}}

{{- define "testbed.pod" -}}
restartPolicy: Never
activeDeadlineSeconds: {{ sub (int .Values.workload.deadlineSeconds) 60 }}
terminationGracePeriodSeconds: 30
automountServiceAccountToken: {{ eq .Values.results.kind "bucket" }}
{{- if .Values.workload.serviceAccount }}
serviceAccountName: {{ .Values.workload.serviceAccount }}
{{- end }}
{{- if eq .Values.workload.controller "job" }}
subdomain: {{ .Release.Name }}
{{- end }}
{{- if eq .Values.network.mode "host" }}
hostNetwork: true
dnsPolicy: ClusterFirstWithHostNet
{{- end }}
{{- with .Values.workload.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
tolerations:
  - key: nvidia.com/gpu
    operator: Exists
affinity:
  podAntiAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      - topologyKey: kubernetes.io/hostname
        labelSelector:
          matchLabels:
            deep-ep/uses-gpus: "true"
  {{- if not .Values.queue }}
  {{- if eq .Values.topology.mode "preferred" }}
  podAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 100
        podAffinityTerm:
          topologyKey: {{ .Values.topology.level }}
          labelSelector:
            matchLabels:
              app.kubernetes.io/instance: {{ .Release.Name }}
              deep-ep/uses-gpus: "true"
  {{- else if eq .Values.topology.mode "required" }}
  podAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      - topologyKey: {{ .Values.topology.level }}
        labelSelector:
          matchLabels:
            app.kubernetes.io/instance: {{ .Release.Name }}
            deep-ep/uses-gpus: "true"
  {{- end }}
  {{- end }}
containers:
  - name: testbed
    image: {{ .Values.image }}
    command: [/bin/bash, /scripts/run.sh]
    env:
      - name: TESTBED_NODES
        value: {{ include "testbed.nodes" . | quote }}
      - name: MASTER_ADDR
        value: {{ include "testbed.first" . }}
      - name: MASTER_PORT
        value: "29500"
      - name: TESTBED_NODE_NAME
        value: {{ include "testbed.name" . }}
      - name: TESTBED_STAGES
        value: {{ include "testbed.stages" . | trim | quote }}
      - name: TESTBED_CONNECT_SECONDS
        value: {{ .Values.tests.connectivity.seconds | quote }}
      - name: TESTBED_SLEEP_SECONDS
        value: {{ .Values.workload.sleepSeconds | quote }}
      - name: TESTBED_RESULTS
        value: /results/{{ .Values.results.directory }}
      {{- if and .Values.workload.driverFolder (not (hasKey .Values.workload.env "LD_LIBRARY_PATH")) }}
      - name: LD_LIBRARY_PATH  # the image's rdma-core before what other installers left beside the driver; gIB brings an NCCL
        value: {{ if .Values.workload.gibFolder }}/usr/local/nvidia/lib64:/usr/local/gib/lib64{{ else }}/usr/lib/x86_64-linux-gnu:/usr/local/nvidia/lib64{{ end }}
      {{- end }}
      {{- if not (hasKey .Values.workload.env "DEEP_EP_RDMA_TRAFFIC_CLASS") }}
      - name: DEEP_EP_RDMA_TRAFFIC_CLASS
        value: {{ .Values.network.trafficClass | quote }}
      {{- end }}
      {{- range $name, $value := .Values.workload.env }}
      - name: {{ $name }}
        value: {{ $value | quote }}
      {{- end }}
      {{- range .Values.workload.secretEnv }}
      - name: {{ .name }}
        valueFrom:
          secretKeyRef:
            name: {{ .secret }}
            key: {{ .key }}
      {{- end }}
    resources:
      limits:
        nvidia.com/gpu: 8
        {{- with .Values.network.rdmaResource }}
        {{ . }}: 1
        {{- end }}
      requests:
        cpu: {{ .Values.workload.cpu | quote }}
        memory: {{ .Values.workload.memory }}
    securityContext:
      {{- if .Values.workload.privileged }}
      privileged: true
      {{- else }}
      allowPrivilegeEscalation: false
      capabilities:
        drop: [ALL]
        # sshd needs the other three.
        add: [IPC_LOCK{{ if .Values.tests.nccl.enabled }}, SETUID, SETGID, SYS_CHROOT{{ end }}]
      {{- end }}
    volumeMounts:
      - name: scripts
        mountPath: /scripts
        readOnly: true
      - name: shm
        mountPath: /dev/shm
      - name: results
        mountPath: /results
      {{- if not .Values.network.rdmaResource }}
      - name: infiniband
        mountPath: /dev/infiniband
        readOnly: true
      {{- end }}
      - name: podinfo
        mountPath: /etc/podinfo
        readOnly: true
      {{- if .Values.workload.driverFolder }}
      - name: driver
        mountPath: /usr/local/nvidia
        readOnly: true
      {{- end }}
      {{- if .Values.workload.gibFolder }}
      - name: gib
        mountPath: /usr/local/gib
        readOnly: true
      {{- end }}
      {{- if .Values.tests.nccl.enabled }}
      - name: ssh
        mountPath: /etc/testbed-ssh
        readOnly: true
      {{- end }}
volumes:
  - name: scripts
    configMap:
      name: {{ .Release.Name }}
  - name: shm
    emptyDir:
      medium: Memory
      sizeLimit: {{ .Values.workload.sharedMemory }}
  - name: results
    {{- if eq .Values.results.kind "claim" }}
    persistentVolumeClaim:
      claimName: {{ .Values.results.claim }}
    {{- else if eq .Values.results.kind "bucket" }}
    csi:
      driver: gcsfuse.csi.storage.gke.io
      volumeAttributes:
        bucketName: {{ .Values.results.bucket }}
    {{- else }}
    emptyDir: {}
    {{- end }}
  {{- if not .Values.network.rdmaResource }}
  - name: infiniband
    hostPath:
      path: /dev/infiniband
      type: Directory
  {{- end }}
  - name: podinfo
    downwardAPI:
      items:
        - path: annotations
          fieldRef:
            fieldPath: metadata.annotations
        - path: labels
          fieldRef:
            fieldPath: metadata.labels
  {{- if .Values.workload.driverFolder }}
  - name: driver
    hostPath:
      path: {{ .Values.workload.driverFolder }}
      type: Directory
  {{- end }}
  {{- if .Values.workload.gibFolder }}
  - name: gib
    hostPath:
      path: {{ .Values.workload.gibFolder }}
      type: Directory
  {{- end }}
  {{- if .Values.tests.nccl.enabled }}
  - name: ssh
    secret:
      secretName: {{ .Release.Name }}-ssh
      defaultMode: 256
  {{- end }}
{{- end -}}

{{- define "testbed.stages" -}}
{{- if .Values.workload.launcher -}}
launcher
{{- else -}}
{{- if .Values.tests.connectivity.enabled }}connectivity {{ end -}}
{{- if .Values.tests.nccl.enabled }}nccl {{ end -}}
{{- if .Values.tests.internode.enabled }}internode{{ end -}}
{{- end -}}
{{- end -}}
