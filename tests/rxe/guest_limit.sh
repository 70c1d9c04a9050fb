# shellcheck shell=bash
# Sourced in the emulated machine: limits of time, as long as the host makes them.

# Such a machine boots in 3 to 4 s on a host with nothing else to do. One that took longer is slower at all else, too; a
# host that becomes busy only later is why no limit is less than twice what a quiet one needs.
boot_seconds=$(cat /tmp/boot_seconds)
time_factor=$(((boot_seconds + 3) / 4))
[ $time_factor -ge 2 ] || time_factor=2
[ $time_factor -le 4 ] || time_factor=4
# Deadlines of the tests themselves: tests/support/time_scale.hpp, which sees the load of this machine only.
export time_factor DEEP_EP_TEST_TIME_FACTOR=$time_factor

# doing WHAT: says so, and what threads of the library's programs wait for, and what the devices have counted. Without
# other programs, which take long to start where the host is busy.
doing() {
  local task device name wait value fields counter counted
  read -r value _ </proc/uptime
  echo "rxe: $1, at $value s of this machine, which took $boot_seconds s to boot:"
  for task in /proc/[0-9]*/task/*; do
    read -r name <"$task/comm" || continue
    [[ $name == deep_ep* ]] || continue
    wait=
    read -r wait <"$task/wchan"
    read -r value <"$task/stat"
    read -r -a fields <<<"${value##*) }"
    echo "  thread ${task##*/} of $name: state ${fields[0]}, waits in ${wait:-0}, ${fields[11]} + ${fields[12]} ticks"
  done 2>/dev/null
  for device in /sys/class/infiniband/*; do
    counted=
    for counter in "$device"/ports/1/hw_counters/*; do
      name=${counter##*/}
      read -r value <"$counter" && [ "$value" != 0 ] && [ "$name" != lifespan ] && counted+=" $name $value,"
    done 2>/dev/null
    echo "  ${device##*/}:${counted%,}"
  done
}

# within SECONDS NAME COMMAND...: runs the command for so many seconds of a quiet host at most. One that takes longer ends,
# and what it was doing is told. Exit status: the command's, 124 for one that did not end.
within() {
  local seconds=$(($1 * time_factor)) name=$2 running watcher status=0
  shift 2
  timeout --kill-after=5 $((seconds + 5 * time_factor)) "$@" &
  running=$!
  (
    sleep $seconds
    doing "'$name' has not ended within $seconds s"
  ) &
  watcher=$!
  wait $running || status=$?
  kill $watcher 2>/dev/null
  return $status
}
