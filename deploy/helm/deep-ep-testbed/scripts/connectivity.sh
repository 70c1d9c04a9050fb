#!/usr/bin/env bash
# One node's part: does it know the names of all nodes, and are its GPUs and NICs usable?
set -uo pipefail
for ((node = 0; node < TESTBED_NODES; ++node)); do
  # shellcheck disable=SC2059
  name=$(printf "$TESTBED_NODE_NAME" "$node")
  end=$((SECONDS + TESTBED_CONNECT_SECONDS))
  until address=$(getent hosts "$name"); do
    if [ $SECONDS -ge $end ]; then
      echo "node $JOB_COMPLETION_INDEX: $name has no address after $TESTBED_CONNECT_SECONDS s: does its pod run?"
      exit 1
    fi
    sleep 1
  done
  echo "node $JOB_COMPLETION_INDEX: $name is ${address%% *}"
done
"${TESTBED_DEEP_EP:-/opt/deep_ep/bin/deep_ep}" doctor --quick --gpus 8
