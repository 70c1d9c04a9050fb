#!/usr/bin/env bash
# Makes the networks of A4 nodes, once for a cluster: a second gVNIC network, and one for RoCE with a subnet for each of the
# 8 NICs. What is there already stays. Variables: see env.example.
#
#   deploy/gke/create-networks.sh [--dry-run]
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
case ${1:-} in
  "") ;;
  --dry-run) dry_run=1 ;;
  *)
    echo "create-networks.sh: '$1' is unknown, allowed: --dry-run" >&2
    exit 2
    ;;
esac
wants_cluster
wants_zone
wants_networks
stop_if_wrong

# unless_there KIND NAME -- COMMAND...
unless_there() {
  local kind=$1 name=$2
  shift 3
  local place=()
  [ "$kind" != subnets ] || place=(--region "$REGION")
  local group=(compute "$kind")
  [ "$kind" != subnets ] || group=(compute networks subnets)
  if [ $dry_run -eq 0 ] && gcloud "${group[@]}" describe "$name" --project "$PROJECT_ID" "${place[@]}" >/dev/null 2>&1; then
    echo "$kind $name: it is there"
    return
  fi
  do_or_print "$@"
}

net=$NETWORK_PREFIX-net-1
unless_there networks "$net" -- gcloud compute networks create "$net" --project "$PROJECT_ID" --subnet-mode custom
unless_there subnets "$NETWORK_PREFIX-sub-1" -- gcloud compute networks subnets create "$NETWORK_PREFIX-sub-1" \
  --project "$PROJECT_ID" --network "$net" --region "$REGION" --range 192.168.0.0/24
unless_there firewall-rules "$NETWORK_PREFIX-internal-1" -- gcloud compute firewall-rules create "$NETWORK_PREFIX-internal-1" \
  --project "$PROJECT_ID" --network "$net" --allow tcp:0-65535,udp:0-65535,icmp --source-ranges 192.168.0.0/24

rdma=$NETWORK_PREFIX-rdma-net
unless_there networks "$rdma" -- gcloud beta compute networks create "$rdma" --project "$PROJECT_ID" \
  --network-profile "$ZONE-vpc-roce" --subnet-mode custom
for ((nic = 0; nic < 8; ++nic)); do
  unless_there subnets "$NETWORK_PREFIX-rdma-sub-$nic" -- gcloud compute networks subnets create \
    "$NETWORK_PREFIX-rdma-sub-$nic" --project "$PROJECT_ID" --network "$rdma" --region "$REGION" \
    --range "192.168.$((nic + 1)).0/24"
done
