#!/usr/bin/env bash
# Prints what tells GKE about the networks of create-networks.sh: deploy/gke/networks.sh | kubectl apply -f -
# networks.yaml is its output for the prefix my-cluster.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
wants_networks
stop_if_wrong

# network NAME VPC SUBNET MODE
network() {
  cat <<END
---
apiVersion: networking.gke.io/v1
kind: GKENetworkParamSet
metadata:
  name: $1
spec:
  vpc: $2
  vpcSubnet: $3
  deviceMode: $4
---
apiVersion: networking.gke.io/v1
kind: Network
metadata:
  name: $1
spec:
  type: Device
  parametersRef:
    group: networking.gke.io
    kind: GKENetworkParamSet
    name: $1
END
}
network gvnic-1 "$NETWORK_PREFIX-net-1" "$NETWORK_PREFIX-sub-1" NetDevice
for ((nic = 0; nic < 8; ++nic)); do
  network rdma-$nic "$NETWORK_PREFIX-rdma-net" "$NETWORK_PREFIX-rdma-sub-$nic" RDMA
done
