#!/usr/bin/env bash
# Makes a pool of A4 nodes (8 B200 and 8 RoCE NICs each) with GKE's own driver. Variables: see env.example; flags win.
#
#   deploy/gke/create-nodepool.sh [--name POOL] [--nodes N] [--image-type TYPE] [--provisioning KIND] [--autoupgrade] [--dry-run]
#
# Nodes are not upgraded by themselves unless --autoupgrade is given: an upgrade makes new nodes, in the middle of a run. GKE
# refuses that in a cluster that is in a release channel: there, give --autoupgrade, and the cluster a maintenance exclusion.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
upgrade=--no-enable-autoupgrade
while [ $# -gt 0 ]; do
  case $1 in
    --name | --nodes | --image-type | --provisioning)
      if [ $# -lt 2 ]; then
        echo "create-nodepool.sh: $1 needs a value" >&2
        exit 2
      fi
      case $1 in
        --name) NODE_POOL=$2 ;;
        --nodes) NODES=$2 ;;
        --image-type) IMAGE_TYPE=$2 ;;
        --provisioning) PROVISIONING=$2 ;;
      esac
      shift 2
      ;;
    --autoupgrade)
      upgrade=--enable-autoupgrade
      shift
      ;;
    --dry-run)
      dry_run=1
      shift
      ;;
    *)
      echo "create-nodepool.sh: '$1' is unknown, allowed: --name, --nodes, --image-type, --provisioning, --autoupgrade, --dry-run" >&2
      exit 2
      ;;
  esac
done
wants_cluster
wants_zone
wants_networks
wants_pool
wants_nodes
stop_if_wrong

version=()
[ -z "${NODE_VERSION:-}" ] || version=(--node-version "$NODE_VERSION")
provisioning=()
case $PROVISIONING in
  spot) provisioning=(--spot) ;;
  reservation) provisioning=(--reservation-affinity specific --reservation "$RESERVATION_NAME") ;;
esac
networks=(--additional-node-network "network=$NETWORK_PREFIX-net-1,subnetwork=$NETWORK_PREFIX-sub-1")
for ((nic = 0; nic < 8; ++nic)); do
  networks+=(--additional-node-network "network=$NETWORK_PREFIX-rdma-net,subnetwork=$NETWORK_PREFIX-rdma-sub-$nic")
done
# Nodes near each other: reserved ones are already.
placement=()
[ "$PROVISIONING" = reservation ] || placement=(--placement-type COMPACT)

do_or_print gcloud beta container node-pools create "$NODE_POOL" \
  --project "$PROJECT_ID" \
  --cluster "$CLUSTER_NAME" \
  --region "$REGION" \
  --node-locations "$ZONE" \
  "${version[@]}" \
  --machine-type a4-highgpu-8g \
  --accelerator "type=nvidia-b200,count=8,gpu-driver-version=$GPU_DRIVER_VERSION" \
  --image-type "$IMAGE_TYPE" \
  --num-nodes "$NODES" \
  --disk-type hyperdisk-balanced \
  --disk-size 1000 \
  --ephemeral-storage-local-ssd count=32 \
  --metadata disable-legacy-endpoints=true \
  --scopes https://www.googleapis.com/auth/cloud-platform \
  --enable-private-nodes \
  "$upgrade" \
  --enable-autorepair \
  --max-surge-upgrade 1 \
  --max-unavailable-upgrade 0 \
  --shielded-integrity-monitoring \
  --no-shielded-secure-boot \
  "${placement[@]}" \
  "${provisioning[@]}" \
  "${networks[@]}"
