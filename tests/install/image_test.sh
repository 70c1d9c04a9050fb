#!/usr/bin/env bash
# Images, really built by buildah from bases of this machine, and the command run in them without a network.
# usage: image_test.sh SOURCE_DIR BUILD_DIR
set -euo pipefail
source_dir=$1
build_dir=$2
build=$source_dir/image/build
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export HOME=$work TMPDIR=$work
fail() {
  echo "FAILED: $1" >&2
  [ ! -e "$work/out" ] || tail -n 30 "$work/out" >&2
  exit 1
}
skip() {
  echo "SKIPPED: $1"
  exit 77
}
refuses() { # PATTERN ARGUMENT...
  local pattern=$1 status=0
  shift
  "$build" "$@" >"$work/out" 2>&1 || status=$?
  [ $status -eq 2 ] || fail "'$*' ended with $status"
  grep -Eq -- "$pattern" "$work/out" || fail "no line matches '$pattern'"
}

cpack --config "$build_dir/CPackConfig.cmake" -G TGZ -B "$work/packages" >"$work/out" 2>&1 || fail "cpack"
rm -rf "$work/packages/_CPack_Packages"
package=$(echo "$work"/packages/*.tar.gz)

# The command line needs no builder.
refuses "'' is no kind of image, allowed: runtime, distroless, ngc"
refuses '--base is missing' runtime --package "$package"
refuses '--base debian:bookworm: name it by digest' runtime --package "$package" --base debian:bookworm
refuses "--wheel '': there is no such file" ngc --package "$package" --base localhost/base
refuses '--package /nonexistent: there is no such file' distroless --package /nonexistent
refuses '--without-rdma is for distroless' runtime --without-rdma --package "$package" --base localhost/base
touch "$work/deep_ep-1-py3-none-any.whl"
"$build" ngc --dry-run --package "$package" --base "x@sha256:0" --wheel "$work/deep_ep-1-py3-none-any.whl" >"$work/out"
grep -q -- '--build-arg BASE=x@sha256:0 --build-arg BUNDLE=deep_ep-.*tar.gz --build-arg WHEEL=deep_ep-1-py3-none-any.whl .*-t deep-ep-ngc:' "$work/out" ||
  fail "the command for ngc"
# What no image may have: another user's compiler run, keys, a download when it starts.
! grep -nE '^(ENTRYPOINT|CMD).*(sh|apt|pip|curl|wget)|ssh-keygen|gcc|nvcc|:latest' "$source_dir"/image/Dockerfile.* | grep -v ':#' || fail "see above"

# The root file system takes this machine's libraries. One that is too old, or no driver for RDMA, is no image.
rootfs=$source_dir/image/rootfs
rejects() { # PATTERN COMMAND...
  local pattern=$1
  shift
  ! "$@" >"$work/out" 2>&1 || fail "'$*' went well"
  grep -Eq -- "$pattern" "$work/out" || fail "no line matches '$pattern'"
  [ ! -e "$work/rootfs.tar" ] || fail "'$*' made a file"
}
mkdir "$work/newer"
tar -xzf "$package" -C "$work/newer"
sed -i 's/\x00GLIBC_2\.34\x00/\x00GLIBC_9.99\x00/g' "$work"/newer/*/bin/deep_ep
tar -czf "$work/newer.tar.gz" -C "$work/newer" "$(ls "$work/newer")"
rejects "version .GLIBC_9.99' not found" "$rootfs" --without-rdma "$work/newer.tar.gz" "$work/rootfs.tar"
rejects "does not run with this machine's libraries" "$rootfs" "$work/newer.tar.gz" "$work/rootfs.tar"
without=()
library=$(find /usr/lib/"$(uname -m)"-linux-gnu /usr/lib64 -maxdepth 1 -name libibverbs.so.1 2>/dev/null | head -n 1)
if [ -z "$library" ]; then
  without=(--without-rdma)
  rejects 'libibverbs or its mlx5 driver is not on this machine' "$rootfs" "$package" "$work/rootfs.tar"
elif unshare -rm mount -t tmpfs none /mnt 2>/dev/null; then
  # shellcheck disable=SC2016 # of the inner shell
  rejects 'libibverbs or its mlx5 driver is not on this machine' unshare -rm sh -ec 'mount -t tmpfs none "$0"; exec "$@"' \
    "${library%.so.1}" "$rootfs" "$package" "$work/rootfs.tar"
fi
"$rootfs" --without-rdma "$package" "$work/rootfs.tar"
! tar -tf "$work/rootfs.tar" | grep -E 'libibverbs|libmlx5' || fail "--without-rdma has libibverbs"

command -v buildah >/dev/null || skip "buildah is not installed (scripts/setup --deploy)"
[ "$(id -u)" -eq 0 ] || skip "buildah's isolation by chroot needs root here"
buildah=(buildah --storage-driver vfs --root "$work/store" --runroot "$work/run")
export IMAGE_BUILDER="${buildah[*]} bud --isolation chroot"
mkdir "$work/empty"
printf 'FROM scratch\nCOPY . /\n' >"$work/empty/Dockerfile"
"${buildah[@]}" bud --isolation chroot -t probe "$work/empty" >"$work/out" 2>&1 ||
  skip "buildah cannot build an empty image here: $(tail -n 1 "$work/out")"

# inside IMAGE COMMAND...: as its entry point would, without a network.
inside() {
  local container image=$1
  shift
  container=$("${buildah[@]}" from --pull-never "$image")
  unshare -n "${buildah[@]}" run --isolation chroot "$container" -- "$@" >"$work/out" 2>&1 || fail "$image: '$*' failed"
  "${buildah[@]}" rm "$container" >/dev/null
}
check_image() { # IMAGE USER
  local tool=/opt/deep_ep/bin/deep_ep container root
  inside "$1" $tool --version
  grep -q '^  transports ' "$work/out" || fail "$1: --version"
  inside "$1" $tool doctor --json
  grep -q '"findings"' "$work/out" || fail "$1: the doctor's report"
  inside "$1" $tool env --format shell
  inside "$1" $tool demo --input /etc/passwd --tokens 16 --hidden 256 --ranks 2
  grep -q '^OK: ' "$work/out" || fail "$1: the check on two ranks"
  "${buildah[@]}" inspect --type image "$1" >"$work/inspect"
  python3 - "$work/inspect" "$2" <<'PYTHON' || fail "$1: its configuration"
import json, sys
config = json.load(open(sys.argv[1]))["OCIv1"]["config"]
assert config["Entrypoint"] == ["/opt/deep_ep/bin/deep_ep"] and config["Cmd"] == ["doctor"], config
assert config["User"] == sys.argv[2], config
PYTHON
  container=$("${buildah[@]}" from --pull-never "$1")
  root=$("${buildah[@]}" mount "$container")
  ! find "$root" -type f \( -name 'gcc*' -o -name 'g++*' -o -name cc1plus -o -name nvcc -o -name 'ssh_host_*' -o -name '*.pem' \) |
    grep . || fail "$1 has a compiler or a key"
  ! grep -rIl 'PRIVATE KEY-----' "$root/etc" "$root/opt" || fail "$1 has a key"
  "${buildah[@]}" umount "$container" >/dev/null
  "${buildah[@]}" rm "$container" >/dev/null
}

# From nothing: the command, its libraries, and nobody's shell.
"$build" distroless "${without[@]}" --package "$package" --tag distroless --build-arg RUN_AS=65532 >"$work/out" 2>&1 || fail "distroless"
check_image distroless 65532
container=$("${buildah[@]}" from --pull-never distroless)
root=$("${buildah[@]}" mount "$container")
[ "$(find "$root" -type f -perm /111 ! -name '*.so*')" = "$root/opt/deep_ep/bin/deep_ep" ] || fail "there are other programs in it"
# What is not the command makes the base of the other image, with a shell for its RUN.
mkdir "$work/base"
cp -a "$root/." "$work/base/"
rm -rf "$work/base/opt"
"${buildah[@]}" umount "$container" >/dev/null
mkdir -p "$work/base/bin"
cp /bin/sh "$work/base/bin/sh"
printf 'FROM scratch\nCOPY . /\n' >"$work/Dockerfile.base"
"${buildah[@]}" bud --isolation chroot -t localhost/base -f "$work/Dockerfile.base" "$work/base" >"$work/out" 2>&1 || fail "the base"
"$build" runtime --package "$package" --base localhost/base --tag runtime --build-arg PACKAGES= >"$work/out" 2>&1 || fail "runtime"
check_image runtime 0
inside runtime /bin/sh -c 'deep_ep --version && test -d /opt/deep_ep/include'
# The same package gives the same files: the image can be compared by digest.
"$rootfs" "${without[@]}" "$package" "$work/again.tar"
"$rootfs" "${without[@]}" "$package" "$work/once-more.tar"
tar -tvf "$work/again.tar" | awk '{$4 = $5 = ""; print}' | cmp - <(tar -tvf "$work/once-more.tar" | awk '{$4 = $5 = ""; print}')
echo "distroless and runtime were built, and run"
