#!/usr/bin/env bash
# Checks all variables of env.example, and that the programs are there. Says all that is wrong; status 2 if something is.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
wants_cluster
wants_zone
wants_networks
wants_pool
wants_nodes
wants ARTIFACT_REGISTRY '[a-z0-9-]+-docker\.pkg\.dev/[^/]+/[^/ ]+' asia-southeast1-docker.pkg.dev/my-project/images
wants IMAGE_TAG '[A-Za-z0-9_][A-Za-z0-9._-]*' v1
if [ "${IMAGE_TAG:-}" = latest ]; then problem "IMAGE_TAG is 'latest', allowed: one that stays, such as v1"; fi
wants BASE_IMAGE '[^@ ]+@sha256:[0-9a-f]{64}' 'docker.io/library/debian@sha256:DIGEST'
[ -z "${GCS_BUCKET:-}" ] || wants GCS_BUCKET '[a-z0-9][-a-z0-9_.]*' my-bucket
wants KUEUE_NAME '[a-z0-9]([-a-z0-9]*[a-z0-9])?' a4-high
# What the example has in the place of yours.
if [ "${PROJECT_ID:-}" = my-project ]; then problem "PROJECT_ID is still the example's my-project, allowed: your own"; fi
if [[ ${ARTIFACT_REGISTRY:-} == */my-project/* ]]; then
  problem "ARTIFACT_REGISTRY is still in the example's my-project, allowed: a repository of your own"
fi
if [[ ${BASE_IMAGE:-} =~ @sha256:0+$ ]]; then
  problem "BASE_IMAGE still has the example's digest of zeros, allowed: that of an image, as 'docker buildx imagetools inspect' prints it"
fi
for program in gcloud kubectl; do
  command -v $program >/dev/null || problem "there is no program $program"
done
stop_if_wrong
echo "$NODES nodes a4-highgpu-8g as pool $NODE_POOL of $CLUSTER_NAME in $ZONE, project $PROJECT_ID"
