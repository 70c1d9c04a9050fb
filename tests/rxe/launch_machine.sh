#!/usr/bin/env bash
# On one of two emulated machines: `deep_ep launch` with two ranks here and two there, on the CPU, with RoCE in between.
# First a benchmark that checks its results; then the same without end, of which one rank on machine 1 is killed.
#
#   launch_machine.sh DEEP_EP ID
#
# Exit status 0 if both launchers said what happened, all logs are there and nothing is left.
set -u
tool=$1
id=$2
export DEEP_EP_RDMA_WIRE=verbs MASTER_ADDR=10.2.0.1 WORLD_SIZE=2 RANK=$id
bench=("$tool" bench internode --device cpu --nodes 2 --experts 8 --topk 3 --tokens 24 --hidden 256 --cached-only)

# wrong WHAT LOGS: says so, with what there is to read.
wrong() {
  echo "launch: machine $id: $1"
  tail -n 20 "/tmp/$2".out "/tmp/$2"/* 2>/dev/null
  exit 1
}

# launch LOGS STATUS COMMAND...
launch() {
  local logs=$1 expected=$2 status=0
  shift 2
  timeout $((80 * time_factor)) "$tool" launch --scheduler nodes --ranks 2 --join-timeout $((60 * time_factor)) \
    --logs "/tmp/$logs" -- "$@" >"/tmp/$logs.out" 2>&1 || status=$?
  [ $status -eq "$expected" ] || wrong "exit status $status, expected $expected" "$logs"
  local rank
  for rank in $((2 * id)) $((2 * id + 1)); do
    [ -s "/tmp/$logs/rank-$rank.log" ] || wrong "no log of rank $rank" "$logs"
  done
  ! pgrep -f 'bench internode' >/dev/null || wrong "processes are left" "$logs"
  [ -z "$(find /dev/shm -name '*deep_ep*' 2>/dev/null)" ] || wrong "shared memory is left" "$logs"
}

launch well 0 "${bench[@]}" --iterations 2 --check
[ "$id" != 0 ] || grep -q 'Every checked result is exact' /tmp/well/rank-0.log || wrong "nothing was checked" well

# shellcheck disable=SC2016  # for the ranks' shell
launch killed 137 sh -c 'if [ "$RANK" = 3 ]; then "$@" & sleep 4; kill -9 $!; wait $!; else exec "$@"; fi' rank \
  "${bench[@]}" --iterations 100000
grep -q 'rank 3' /tmp/killed.out || wrong "nobody names rank 3" killed
echo "launch: machine $id: well"
