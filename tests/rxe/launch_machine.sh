#!/usr/bin/env bash
# On one of two emulated machines: a benchmark that checks its results, with two processes here and two there, on the CPU,
# with RoCE in between.
#
#   launch_machine.sh DEEP_EP ID
#
# Exit status 0 if the results are right and nothing is left.
set -u
tool=$1
id=$2
export DEEP_EP_RDMA_WIRE=verbs MASTER_ADDR=10.2.0.1 WORLD_SIZE=2 RANK=$id
bench=("$tool" bench internode --device cpu --nodes 2 --experts 8 --topk 3 --tokens 24 --hidden 256 --cached-only)

wrong() {
  echo "launch: machine $id: $1"
  tail -n 20 /tmp/launch.out
  exit 1
}

timeout $((80 * time_factor)) "${bench[@]}" --spawn 2 --iterations 2 --check >/tmp/launch.out 2>&1 || wrong "exit status $?"
[ "$id" != 0 ] || grep -q '^Every checked result is exact' /tmp/launch.out || wrong "nothing was checked"
! pgrep -f 'bench internode' >/dev/null || wrong "processes are left"
[ -z "$(find /dev/shm -name '*deep_ep*' 2>/dev/null)" ] || wrong "shared memory is left"
echo "launch: machine $id: well"
