#!/usr/bin/env bash
# On one of two emulated machines: benchmarks of both modes that check their results, with two processes here and two there,
# on the CPU, with RoCE in between. Low-latency ranks find out by themselves which of them share a machine.
#
#   launch_machine.sh DEEP_EP ID
#
# Exit status 0 if the results are right and nothing is left.
set -u
tool=$1
id=$2
export DEEP_EP_RDMA_WIRE=verbs MASTER_ADDR=10.2.0.1 WORLD_SIZE=2 RANK=$id
wrong() {
  echo "launch: machine $id: $1"
  tail -n 20 /tmp/launch.out
  exit 1
}

for bench in "internode --nodes 2 --cached-only --tokens 24 --iterations 2" "low-latency --dtype bf16 --tokens 4 --iterations 1 --warmup 0"; do
  read -r -a words <<<"$bench"
  # shellcheck disable=SC2154 # guest_limit.sh sets it
  timeout $((80 * time_factor)) "$tool" bench "${words[@]}" --device cpu --experts 8 --topk 3 --hidden 256 --spawn 2 --check \
    >/tmp/launch.out 2>&1 || wrong "$bench: exit status $?"
  [ "$id" != 0 ] || grep -q '^Every checked result is ' /tmp/launch.out || wrong "$bench: nothing was checked"
done
! pgrep -f ' bench ' >/dev/null || wrong "processes are left"
[ -z "$(find /dev/shm -name '*deep_ep*' 2>/dev/null)" ] || wrong "shared memory is left"
echo "launch: machine $id: well"
