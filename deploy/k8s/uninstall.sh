#!/usr/bin/env bash
# Removes what the installer wrote on the nodes and on their annotations, then all objects of the namespace. The claim
# deep-ep-logs, and the namespace with it, stays if there is one.
#
#   deploy/k8s/uninstall.sh [--logs]     --logs: that claim too, with the logs in it
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
logs=0
case $*, in
  ,) ;;
  --logs,) logs=1 ;;
  *)
    echo "uninstall: '$*' is unexpected, allowed: --logs" >&2
    exit 2
    ;;
esac
# Nodes are emptied by a pod of this image.
if ! awk '/ - name: / { mine = $3 == "deep-ep" } mine && $1 == "newName:" && $2 !~ /^registry\.invalid\// { found = 1 } END { exit !found }' \
  "$here/image/kustomization.yaml"; then
  echo "uninstall: no image is set, which empties the nodes' folders: deploy/k8s/set-image.sh REGISTRY/PATH@sha256:DIGEST" >&2
  exit 2
fi
overlay=$here/overlays/uninstall
# What may still run from the nodes' folders goes first.
kubectl delete -k "$overlay" -l 'app.kubernetes.io/component in (intranode,internode,collect-logs),!deep-ep/keep' --ignore-not-found
kubectl apply -k "$overlay" -l app.kubernetes.io/component=installer
kubectl rollout status daemonset/deep-ep-installer -n deep-ep --timeout 300s
claim=
[ $logs -eq 1 ] || claim=$(kubectl get pvc deep-ep-logs -n deep-ep --ignore-not-found -o name)
if [ -n "$claim" ]; then
  kubectl delete -k "$overlay" -l '!deep-ep/keep' --ignore-not-found
  echo "The claim deep-ep-logs of namespace deep-ep stays, with the logs: deploy/k8s/uninstall.sh --logs deletes both."
else
  kubectl delete -k "$overlay" --ignore-not-found
fi
