#!/usr/bin/env bash
# The wheel for aarch64, compiled here without GPU code: its tag, and that the command and the package dispatch and combine
# under qemu-user, which runs other machines' instructions in their order: no test of weak memory ordering.
# usage: aarch64_test.sh SOURCE_DIR
set -euo pipefail
cd "$1"
root=$PWD/build/aarch64/sysroot
[ -e build/aarch64/cuda/lib64 ] || { echo "SKIPPED: there is no build/aarch64 (scripts/setup --aarch64)" && exit 77; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python=python3
[ ! -x build/python/bin/python ] || python=$PWD/build/python/bin/python
scripts/wheels --aarch64 --gpu no --quick --out "$work" "$python"
wheel=$(echo "$work"/*.whl)
[[ ${wheel##*/} =~ ^deep_ep_cpu-.*-(cp3[0-9]+)-(cp3[0-9]+)-manylinux_2_3[0-9]_aarch64\.whl$ ]] || { echo "FAILED: the wheel is called $wheel" && exit 1; }
tag=${BASH_REMATCH[1]}
"$python" -m zipfile -e "$wheel" "$work/site"
chmod +x "$work/site/deep_ep/bin/deep_ep"
for file in "$work"/site/deep_ep/_native*.so "$work/site/deep_ep/bin/deep_ep"; do
  readelf -h "$file" | grep 'Machine: *AArch64' >/dev/null || { echo "FAILED: $file is not for aarch64" && exit 1; }
done
[ -e "$work/site/deep_ep/_native.${tag/cp/cpython-}-aarch64-linux-gnu.so" ] || { ls "$work/site/deep_ep" && exit 1; }
emulated=(qemu-aarch64-static -L "$root")
selftest() { # STAGE...: each must be right
  local stage
  "${emulated[@]}" "$work/site/deep_ep/bin/deep_ep" bench selftest >"$work/log" 2>&1 || true
  for stage in "$@"; do
    grep "^PASS $stage: [0-9]* cases are right" "$work/log" || { cat "$work/log" && echo "FAILED: $stage" && exit 1; }
  done
}
# Its last stage starts the command itself, which no kernel without binfmt_misc can do. Two processes come below.
selftest "one rank" "two ranks" "two nodes"
MASTER_PORT=$("$python" -c 'import socket; probe = socket.socket(); probe.bind(("127.0.0.1", 0)); print(probe.getsockname()[1])')
export WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT
RANK=1 LOCAL_RANK=1 "${emulated[@]}" "$work/site/deep_ep/bin/deep_ep" bench selftest >/dev/null &
RANK=0 LOCAL_RANK=0 selftest "2 ranks (processes, TCP)"
wait $!

other=$(readlink -f "$root/usr/bin/python3")
version=${other##*python}
[ "$tag" = "cp${version/./}" ] || { echo "the Python below $root is $version: the package is not tried" && exit 0; }
# What test_wheel.py does with a wheel of this machine.
PYTHONPATH=tests/python DEEP_EP_WHEEL=none "$python" -c 'import test_wheel; print(test_wheel.DISPATCH)' >"$work/dispatch.py"
"${emulated[@]}" -E PYTHONPATH="$work/site:$PWD/build/aarch64/packages" "$other" "$work/dispatch.py" | tee "$work/log"
grep -q '^dispatched and combined' "$work/log"
