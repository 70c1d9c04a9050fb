#!/usr/bin/env bash
# NCCL's all-reduce over all nodes by mpirun, which starts on the first node and reaches the others by ssh, with the key of
# the release's Secret. JOB_COMPLETION_INDEX is the node's number. Every node stays until the first has finished.
set -uo pipefail
work=$TESTBED_WORK/nccl
keys=${TESTBED_KEYS:-/etc/testbed-ssh}
port=${TESTBED_SSH_PORT:-2222}
user=$(id -un)
rm -rf "$work"
mkdir -p "$work"
chmod 700 "$work"
name_of() {
  # shellcheck disable=SC2059
  printf "$TESTBED_NODE_NAME" "$1"
}

# What sshd needs, all of it here.
install -m 600 "$keys/id" "$work/id" || exit 1
install -m 600 "$keys/id.pub" "$work/authorized_keys" || exit 1
[ "$(id -u)" -ne 0 ] || mkdir -p /run/sshd
cat >"$work/sshd_config" <<END
Port $port
HostKey $work/id
AuthorizedKeysFile $work/authorized_keys
PidFile $work/sshd.pid
StrictModes no
PasswordAuthentication no
KbdInteractiveAuthentication no
AllowUsers $user
MaxStartups 100
END
"$(command -v sshd || echo /usr/sbin/sshd)" -D -e -f "$work/sshd_config" 2>"$work/sshd.log" &
sshd=$!
trap 'kill $sshd 2>/dev/null' EXIT
# All nodes have one key, so its public half is every host's too.
echo "* $(cut -d ' ' -f 1,2 "$keys/id.pub")" >"$work/known_hosts"
cat >"$work/ssh_config" <<END
Host *
  Port $port
  User $user
  IdentityFile $work/id
  IdentitiesOnly yes
  UserKnownHostsFile $work/known_hosts
  StrictHostKeyChecking yes
  CheckHostIP no
  BatchMode yes
  ConnectTimeout 5
  LogLevel ERROR
END
on() {
  ssh -F "$work/ssh_config" "$@"
}

if [ "$JOB_COMPLETION_INDEX" != 0 ]; then
  # The first node may have failed before this stage. It calls the others in turn, each for at most so long.
  patience=$((TESTBED_CONNECT_SECONDS * TESTBED_NODES))
  end=$((SECONDS + patience))
  until [ -e "$work/done" ]; do
    if ! kill -0 $sshd 2>/dev/null; then
      echo "node $JOB_COMPLETION_INDEX: sshd ended: $(tail -n 1 "$work/sshd.log")"
      exit 1
    fi
    if [ ! -e "$work/called" ] && [ $SECONDS -ge $end ]; then
      echo "node $JOB_COMPLETION_INDEX: the first node has not called for $patience s: did it fail?"
      exit 1
    fi
    sleep 1
  done
  exit "$(cat "$work/done")"
fi

finish() {
  local node
  for ((node = 1; node < TESTBED_NODES; ++node)); do
    on "$(name_of "$node")" "echo $1 > $work/done.new && mv $work/done.new $work/done"
  done
  exit "$1"
}
# Neighbours of the fabric are neighbours in the list: NCCL's rings follow it. Nodes whose place is unknown keep their order.
for ((node = 0; node < TESTBED_NODES; ++node)); do
  end=$((SECONDS + TESTBED_CONNECT_SECONDS))
  until place=$(on "$(name_of "$node")" "touch $work/called; cat $TESTBED_WORK/topology" 2>"$work/error"); do
    if [ $SECONDS -ge $end ]; then
      echo "node $node $(name_of "$node"): no ssh after $TESTBED_CONNECT_SECONDS s: $(cat "$work/error")"
      exit 1
    fi
    sleep 1
  done
  printf '%s\t%d\t%s\n' "${place:--}" "$node" "$(name_of "$node")"
done | sort -t "$(printf '\t')" -k 1,1 -k 2,2n >"$work/map" || exit 1
while IFS=$'\t' read -r place node name; do
  echo "# node $node $name $place"
  echo "$name slots=8" >&3
done <"$work/map" 3>"$work/hosts" | tee "$TESTBED_RESULTS/node-map.txt"

mapfile -t command < <(grep -v '^$' "$(dirname "${BASH_SOURCE[0]}")/nccl.args")
# The settings of NCCL's plugin for this network, where the node brings them.
gib=/usr/local/gib/scripts/set_nccl_env.sh
options=()
[ "$(id -u)" -ne 0 ] || options+=(--allow-run-as-root)
# Networks for RoCE carry nothing else: MPI and NCCL's bootstrap keep to the interface of the default route.
interface=$(awk '$2 == "00000000" { print $1; exit }' "${TESTBED_ROUTES:-/proc/net/route}")
if [ -n "$interface" ]; then
  options+=(--mca oob_tcp_if_include "$interface" --mca btl_tcp_if_include "$interface")
  export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-$interface}
fi
# Programs that ssh starts have none of the pod's variables.
for name in $(compgen -e | grep -E '^(NCCL_|CUDA_|LD_LIBRARY_PATH$)'); do
  options+=(-x "$name")
done
results=$TESTBED_RESULTS/nccl-test-results.txt
# By its path, so that it is found on the other nodes too.
# shellcheck disable=SC2016
"$(command -v mpirun)" --hostfile "$work/hosts" -np $((TESTBED_NODES * 8)) "${options[@]}" \
  --mca plm_rsh_agent "ssh -F $work/ssh_config" --mca plm_rsh_no_tree_spawn 1 --mca orte_keep_fqdn_hostnames 1 \
  bash -c '[ ! -r "$0" ] || . "$0"; exec "$@"' "$gib" "${command[@]}" 2>&1 | tee "$results"
status=${PIPESTATUS[0]}
# Wrong sums and a table without its end are failures, though the program ends well. Columns 9 and 13 count wrong values.
[ "$status" -ne 0 ] || awk '$1 ~ /^[0-9]+$/ && NF == 13 { rows++; if ($9 + $13 > 0) { print "wrong values: " $0; wrong = 1 } }
  /Out of bounds values/ && !/OK/ { print; wrong = 1 }
  /Avg bus bandwidth/ { ended = 1 }
  END { if (!rows || !ended) print "the table of nccl-tests is cut short"; exit wrong || !rows || !ended }' "$results" || status=1
finish "$status"
