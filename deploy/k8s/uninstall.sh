#!/usr/bin/env bash
# Removes what the installer wrote on the nodes and on their annotations, then all objects of the namespace, and it.
#
#   deploy/k8s/uninstall.sh
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
if [ $# -ne 0 ]; then
  echo "uninstall: '$*' is unexpected: it takes no argument" >&2
  exit 2
fi
# Nodes are emptied by a pod of this image.
if ! awk '/ - name: / { mine = $3 == "deep-ep" } mine && $1 == "newName:" && $2 !~ /^registry\.invalid\// { found = 1 } END { exit !found }' \
  "$here/image/kustomization.yaml"; then
  echo "uninstall: no image is set, which empties the nodes' folders: deploy/k8s/set-image.sh REGISTRY/PATH@sha256:DIGEST" >&2
  exit 2
fi
overlay=$here/overlays/uninstall
# What may still run from the nodes' folders goes first.
kubectl delete -k "$overlay" -l 'app.kubernetes.io/component in (intranode,internode)' --ignore-not-found
kubectl apply -k "$overlay" -l app.kubernetes.io/component=installer
kubectl rollout status daemonset/deep-ep-installer -n deep-ep --timeout 300s
kubectl delete -k "$overlay" --ignore-not-found
