#!/usr/bin/env bash
# The testbed, on every node: its stages one after the other. The first that fails ends this node's part, with its status;
# the others then wait for it in vain, and fail too. Logs: $TESTBED_RESULTS/connectivity-test.log, nccl-test-results.txt,
# node-map.txt, pod-logs/.
set -uo pipefail
scripts=$(dirname "${BASH_SOURCE[0]}")
deep_ep=${TESTBED_DEEP_EP:-/opt/deep_ep/bin/deep_ep}
index=$JOB_COMPLETION_INDEX
export TESTBED_WORK=${TESTBED_WORK:-/tmp/testbed}

# Where this node is, as block/subblock/host, if somebody says so.
topology() {
  if [ -n "${TESTBED_TOPOLOGY:-}" ]; then
    echo "$TESTBED_TOPOLOGY"
    return
  fi
  # shellcheck disable=SC2016
  timeout 5 bash -c '
    exec 3<>/dev/tcp/metadata.google.internal/80
    printf "GET /computeMetadata/v1/instance/attributes/physical_host HTTP/1.0\r\nMetadata-Flavor: Google\r\n\r\n" >&3
    mapfile -t lines <&3
    [[ ${lines[0]} == *" 200 "* ]] && echo "${lines[-1]}"' 2>/dev/null || true
}

# The first node's name is known before its pod is ready, but not before there is one.
wait_for_first() {
  local end=$((SECONDS + TESTBED_CONNECT_SECONDS))
  until getent hosts "$MASTER_ADDR" >"$TESTBED_WORK/first"; do
    if [ $SECONDS -ge $end ]; then
      echo "$MASTER_ADDR has no address after $TESTBED_CONNECT_SECONDS s: does the first pod run?"
      return 1
    fi
    sleep 1
  done
}

# What a file has as lines, as arguments.
lines_of() {
  mapfile -t arguments < <(grep -v '^$' "$1")
}

# Repeats a file of the results in the log, from which a reader can cut it out.
repeat() {
  [ "$index" = 0 ] && [ -e "$TESTBED_RESULTS/$1" ] || return 0
  printf '%s\n' "=== begin $1"
  cat "$TESTBED_RESULTS/$1"
  printf '%s\n' "=== end $1"
}

stages() {
  local stage status
  topology >"$TESTBED_WORK/topology"
  wait_for_first || return
  for stage in $TESTBED_STAGES; do
    echo "stage $stage"
    case $stage in
      connectivity)
        if [ "$index" = 0 ]; then
          bash "$scripts/connectivity.sh" >"$TESTBED_RESULTS/connectivity-test.log" 2>&1
        else
          bash "$scripts/connectivity.sh"
        fi
        status=$?
        repeat connectivity-test.log
        ;;
      nccl)
        bash "$scripts/nccl.sh"
        status=$?
        repeat nccl-test-results.txt
        ;;
      internode)
        lines_of "$scripts/internode.args"
        RANK=$index WORLD_SIZE=$TESTBED_NODES \
          "$deep_ep" bench internode --spawn 8 --nodes "$TESTBED_NODES" --check "${arguments[@]}"
        status=$?
        ;;
      launcher)
        bash "$scripts/launcher.sh"
        status=$?
        ;;
      *)
        echo "TESTBED_STAGES: '$stage' is unknown, allowed: connectivity, nccl, internode, launcher"
        return 2
        ;;
    esac
    if [ $status -ne 0 ]; then
      echo "stage $stage failed with status $status"
      return $status
    fi
    echo "stage $stage passed"
  done
}

log=worker-$index.log
[ "$index" != 0 ] || log=coordinator.log
mkdir -p "$TESTBED_WORK" "$TESTBED_RESULTS/pod-logs" || exit 1
stages 2>&1 | tee "$TESTBED_RESULTS/pod-logs/$log"
status=${PIPESTATUS[0]}
if [ "${TESTBED_SLEEP_SECONDS:-0}" -gt 0 ]; then
  echo "the result is $status; this pod stays for $TESTBED_SLEEP_SECONDS s"
  sleep "$TESTBED_SLEEP_SECONDS"
fi
exit "$status"
