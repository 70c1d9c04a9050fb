#!/usr/bin/env bash
# Removes everything: what the installer wrote on the nodes and on their annotations, then all objects of the namespace.
#
#   deploy/k8s/uninstall.sh
set -euo pipefail
if [ $# -ne 0 ]; then
  echo "uninstall: '$1' is unexpected, allowed: no argument" >&2
  exit 2
fi
overlay=$(dirname "${BASH_SOURCE[0]}")/overlays/uninstall
# What may still run from the nodes' folders goes first.
kubectl delete -k "$overlay" -l 'app.kubernetes.io/component in (intranode,internode,collect-logs)' --ignore-not-found
kubectl apply -k "$overlay" -l app.kubernetes.io/component=installer
kubectl rollout status daemonset/deep-ep-installer -n deep-ep --timeout 300s
kubectl delete -k "$overlay" --ignore-not-found
