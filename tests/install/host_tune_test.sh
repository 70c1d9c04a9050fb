#!/usr/bin/env bash
# deep_ep-host-tune on machines that exist as files: it reports first, writes only when told twice, and takes it back.
# usage: host_tune_test.sh SOURCE_DIR
set -euo pipefail
tune=$1/scripts/deep_ep-host-tune
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() {
  echo "FAILED: $1" >&2
  [ ! -e "$work/out" ] || cat "$work/out" >&2
  exit 1
}
# run STATUS ARGUMENT...: on the machine in $root
run() {
  local wanted=$1 status=0
  shift
  "$tune" --sysroot "$root" "$@" >"$work/out" 2>&1 || status=$?
  [ $status -eq "$wanted" ] || fail "'$*' ended with $status, not $wanted"
}
expect() { grep -Eq -- "$1" "$work/out" || fail "no line matches '$1'"; }
# machine NAME REGISTRY_DWORDS STREAM_MEM_OPS MEMLOCK
machine() {
  root=$work/$1
  mkdir -p "$root/proc/driver/nvidia" "$root/proc/self" "$root/etc/modprobe.d"
  printf 'ResmanDebugLevel: 4294967295\nRegistryDwords: "%s"\nEnableStreamMemOPs: %s\n' "$2" "$3" >"$root/proc/driver/nvidia/params"
  printf 'Max locked memory         %s            %s            bytes\n' "$4" "$4" >"$root/proc/self/limits"
}
files() { (cd "$root" && find etc -type f | sort | tr '\n' ' '); }

machine plain "" 0 8388608
run 1
expect '^change  PeerMappingOverride is not 1'
expect '^change  EnableStreamMemOPs is 0'
expect '^change  memlock: 8388608 bytes'
expect '^Nothing was changed'
[ -z "$(files)" ] || fail "the report wrote $(files)"
run 2 --apply
expect 'add --yes'
run 2 --apply --revert --yes
[ -z "$(files)" ] || fail "it wrote without --yes"

run 0 --apply --yes
expect '^wrote   /etc/modprobe.d/deep_ep.conf'
expect 'initial RAM disk'
expect '^Reboot'
[ "$(files)" = "etc/modprobe.d/deep_ep.conf etc/security/limits.d/deep_ep.conf " ] || fail "files: $(files)"
grep -qx 'options nvidia NVreg_RegistryDwords="PeerMappingOverride=1;" NVreg_EnableStreamMemOPs=1' "$root/etc/modprobe.d/deep_ep.conf"
grep -qx '\* hard memlock unlimited' "$root/etc/security/limits.d/deep_ep.conf"
# Written, not in effect yet: nothing more to do, and doing it again does nothing.
run 0
expect '^note    PeerMappingOverride is written, and takes effect with the next reboot'
# Who reads the limits, and who does not.
expect '^ok      memlock: .* for new sessions of PAM'
expect '^note    memlock: slurmd, containerd and other services do not read it: LimitMEMLOCK=infinity'
run 0 --apply --yes
! grep -E '^wrote|Reboot' "$work/out" || fail "it wrote again"
# Booted since, and still not in effect: that is said, and the initial RAM disk is made once more.
written=$(stat -c %Y "$root/etc/modprobe.d/deep_ep.conf")
printf 'cpu 1 2 3\nbtime %s\n' $((written - 60)) >"$root/proc/stat"
run 0
expect '^note    PeerMappingOverride is written, and takes effect with the next reboot'
printf 'cpu 1 2 3\nbtime %s\n' $((written + 60)) >"$root/proc/stat"
echo 'options nvidia NVreg_RegistryDwords=""' >"$root/etc/modprobe.d/nvidia.conf"
run 1
expect '^change  PeerMappingOverride was written before the last boot, and is not in effect: another file'
expect '^change  EnableStreamMemOPs was written before the last boot'
expect 'one of them wins: /etc/modprobe.d/nvidia.conf$'
rm "$root/etc/modprobe.d/nvidia.conf"
touch -d "@$((written - 60))" "$root/etc/modprobe.d/deep_ep.conf"
run 0 --apply --yes
expect 'initial RAM disk'
expect '^Reboot'
printf 'cpu 1 2 3\nbtime %s\n' $((written - 60)) >"$root/proc/stat"
run 0
expect 'takes effect with the next reboot'
run 0 --revert --yes
expect '^removed /etc/modprobe.d/deep_ep.conf'
[ -z "$(files)" ] || fail "left: $(files)"
run 0 --revert --yes
[ ! -s "$work/out" ] || fail "there was nothing to take back"

# A machine that is well; and one where another file sets the option, too.
machine well "PeerMappingOverride=1;" 1 unlimited
run 0
expect '^ok      PeerMappingOverride=1'
expect '^ok      memlock: unlimited'
echo 'options nvidia NVreg_RegistryDwords="RMFoo=1;"' >"$root/etc/modprobe.d/nvidia.conf"
run 0
expect '^note    set elsewhere, too, and one of them wins: /etc/modprobe.d/nvidia.conf$'

# A newer driver has no such option; without a driver nothing can be seen; a file that somebody else wrote stays.
machine newer "PeerMappingOverride=1;" 1 unlimited
sed -i /EnableStreamMemOPs/d "$root/proc/driver/nvidia/params"
run 0
expect 'this driver has no such option'
rm -r "$root/proc/driver"
run 0
expect '^note    the NVIDIA driver is not loaded'
echo "# mine" >"$root/etc/modprobe.d/deep_ep.conf"
run 1 --revert --yes
expect 'was not written by deep_ep-host-tune, and stays'
[ -s "$root/etc/modprobe.d/deep_ep.conf" ] || fail "it is gone"

# The command line; and on a real machine, only root.
run 2 --force
expect "unknown argument '--force'"
status=0
"$tune" --sysroot /nonexistent >"$work/out" 2>&1 || status=$?
[ $status -eq 2 ] || fail "a missing sysroot ended with $status"
if [ "$(id -u)" -eq 0 ] && command -v setpriv >/dev/null; then
  status=0
  setpriv --reuid 65534 --regid 65534 --clear-groups "$tune" --apply --yes >"$work/out" 2>&1 || status=$?
  [ $status -eq 2 ] || fail "without root it ended with $status"
  expect 'only root may'
fi

# For real, with an /etc that only this command sees, and something in the place of update-initramfs.
mkdir "$work/stubs"
printf '#!/bin/sh\necho "update-initramfs $*"\n' >"$work/stubs/update-initramfs"
chmod +x "$work/stubs/update-initramfs"
if unshare -rm mount -t tmpfs none /mnt 2>/dev/null; then
  # shellcheck disable=SC2016 # of the inner shell
  PATH=$work/stubs:$PATH unshare -rm sh -ec 'mount -t tmpfs none /etc
    "$0" --apply --yes; ls /etc/modprobe.d /etc/security/limits.d; "$0" --revert --yes; find /etc -type f -printf "left %p\\n"' "$tune" >"$work/out"
  [ "$(grep -c '^update-initramfs -u$' "$work/out")" = 2 ] || fail "the initial RAM disk was not made twice"
  [ "$(grep -c '^deep_ep.conf$' "$work/out")" = 2 ] || fail "the files were not written"
  ! grep '^left' "$work/out" || fail "files are left"
  # One that fails: the file is as it was, so that the next call does it all again.
  # shellcheck disable=SC2016
  printf '#!/bin/sh\n[ -e /etc/works ] || { echo "no space left"; exit 1; }\necho made\n' >"$work/stubs/update-initramfs"
  # shellcheck disable=SC2016
  PATH=$work/stubs:$PATH TMPDIR=$work unshare -rm sh -ec 'mount -t tmpfs none /etc
    status=0; "$0" --apply --yes || status=$?; echo "apply $status"; find /etc -type f -printf "after apply %p\n"
    mkdir -p /etc/modprobe.d; echo "# older" >/etc/modprobe.d/deep_ep.conf
    status=0; "$0" --apply --yes || status=$?; echo "again $status: $(cat /etc/modprobe.d/*)"
    : >/etc/works; "$0" --apply --yes; rm /etc/works
    status=0; "$0" --revert --yes || status=$?; echo "revert $status: $(head -n 1 /etc/modprobe.d/deep_ep.conf)"' "$tune" >"$work/out" 2>&1
  for wanted in '^apply 1$' '^again 1: # older$' '^made$' '^revert 1: # Written by deep_ep-host-tune' \
    'was not made again, so /etc/modprobe.d/deep_ep.conf is as it was'; do
    expect "$wanted"
  done
  ! grep '^after apply' "$work/out" || fail "files are left where the initial RAM disk was not made"
  [ "$(grep -c '^no space left$' "$work/out")" = 3 ] || fail "the initial RAM disk was not tried three times"
  [ "$(find "$work" -mindepth 1 -maxdepth 1 -name 'tmp.*')" = "" ] || fail "temporary files are left"
else
  echo "left out: no namespace with an /etc of its own can be made here"
fi
echo "deep_ep-host-tune does what it says"
