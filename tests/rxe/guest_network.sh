# shellcheck shell=bash disable=SC2034
# Sourced in the emulated machine: makes RDMA devices out of network interfaces.

# wait_for_gid DEVICE: the kernel fills in the address a moment after the device appears.
wait_for_gid() {
  local attempt
  for attempt in $(seq 100); do
    ! grep -q ffff: "/sys/class/infiniband/$1/ports/1/gids/1" || return 0
    sleep 0.1
  done
  echo "rxe: $1 got no IPv4 GID" >&2
  exit 40
}

# add_device NAME INTERFACE
add_device() {
  rdma link add "$1" type rxe netdev "$2" && return
  echo "rxe: no device $1 on $2" >&2
  exit 40
}

# Two devices, rxe0 and rxe1, on the two ends of a cable within one machine. The routes make the kernel send packets
# between its own two addresses over the cable instead of through the loopback interface.
two_devices() {
  local device
  # A link-local address is usable at once, without a check that nobody else has it.
  echo 0 >/proc/sys/net/ipv6/conf/default/accept_dad
  ip link add v0 address 02:00:00:00:00:01 mtu 4200 type veth peer name v1 address 02:00:00:00:00:02 mtu 4200
  for device in v0 v1; do ip link set $device up; done
  ip addr add 10.1.0.1/24 dev v0
  ip addr add 10.1.0.2/24 dev v1
  add_device rxe0 v0
  add_device rxe1 v1
  for device in v0 v1 all; do
    echo 1 >/proc/sys/net/ipv4/conf/$device/accept_local
    echo 0 >/proc/sys/net/ipv4/conf/$device/rp_filter
  done
  wait_for_gid rxe0
  wait_for_gid rxe1
  ip rule add pref 1 iif v0 lookup local
  ip rule add pref 2 iif v1 lookup local
  ip rule add pref 3 from 10.1.0.1 to 10.1.0.2 lookup 101
  ip rule add pref 4 from 10.1.0.2 to 10.1.0.1 lookup 102
  ip rule add pref 100 lookup local
  ip rule del pref 0
  cable_up
}

# What is lost when the cable goes down and has to be set again.
cable_up() {
  ip link set v0 up
  ip link set v1 up
  ip neigh replace 10.1.0.2 lladdr 02:00:00:00:00:02 dev v0 nud permanent
  ip neigh replace 10.1.0.1 lladdr 02:00:00:00:00:01 dev v1 nud permanent
  ip route replace 10.1.0.2 dev v0 table 101
  ip route replace 10.1.0.1 dev v1 table 102
}

# One device, rxe0, on the card to the other machine. Sets `id` and `peer`, the other machine's address.
one_device() {
  local path interface=
  id=$(tr ' ' '\n' </proc/cmdline | sed -n 's/^rxe.id=//p')
  peer=10.2.0.$((2 - id))
  for path in /sys/class/net/*; do [ ! -e "$path/device" ] || interface=${path##*/}; done
  ip link set "$interface" mtu 4200 up
  # The default queue (fq_codel) drops what has waited for some milliseconds: on a busy host hundreds of packets, each of
  # which is sent again.
  tc qdisc replace dev "$interface" root pfifo limit 20000
  ip addr add "10.2.0.$((id + 1))/24" dev "$interface"
  add_device rxe0 "$interface"
  wait_for_gid rxe0
}
