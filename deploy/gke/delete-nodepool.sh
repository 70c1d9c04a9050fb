#!/usr/bin/env bash
# Deletes the node pool, and asks before it does. Networks and the cluster stay.
#
#   deploy/gke/delete-nodepool.sh [--yes] [--dry-run]
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
ask=()
for argument in "$@"; do
  case $argument in
    --yes) ask=(--quiet) ;;
    --dry-run) dry_run=1 ;;
    *)
      echo "delete-nodepool.sh: '$argument' is unknown, allowed: --yes, --dry-run" >&2
      exit 2
      ;;
  esac
done
wants_cluster
wants_pool
stop_if_wrong
do_or_print gcloud container node-pools delete "$NODE_POOL" --project "$PROJECT_ID" --cluster "$CLUSTER_NAME" \
  --region "$REGION" "${ask[@]}"
