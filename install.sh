#!/usr/bin/env bash
# Installs deep_ep into a folder of its own, from this checkout or from a package; needs root for nothing but missing
# build packages. docs/how-to/install.md says more.
#
#   ./install.sh [--prefix DIR] [--gpu auto|yes|no]   builds this checkout and installs it
#   ./install.sh --from FILE.tar.gz [--prefix DIR]    installs what cpack made
#   ./install.sh --build-dir DIR [--prefix DIR]       installs what a build folder holds
#   ./install.sh --uninstall [--prefix DIR]           removes what was installed, and nothing else
#   ./install.sh --dry-run ...                        prints the steps, changes nothing
#
# --prefix is /opt/deep_ep for root, and ~/.local/deep_ep for everybody else, unless given; for the copy of this script
# that is installed it is where that lies. Every installation is a
# folder PREFIX/versions/VERSION; PREFIX/current names the one in use, and PREFIX/bin, lib, include and share lead
# through it. A new one is put there, checked, and then takes over by one rename: a run that ends anywhere leaves the
# old one as it was, and the next run clears away what it left. The version before it stays, until the next one comes.
#
# Exit status: 0 well, 1 a step failed, 2 wrong command line.
set -euo pipefail
export LC_ALL=C
umask 022

usage() { sed -n '5,9s/^#  *//p' "${BASH_SOURCE[0]}"; }
wrong() {
  echo "install.sh: $1" >&2
  exit 2
}

prefix=
from=
build_dir=
gpu=auto
mode=install
dry_run=0
while [ $# -gt 0 ]; do
  case "$1" in
    --prefix | --from | --build-dir | --gpu)
      [ -n "${2:-}" ] || wrong "$1: its value is missing"
      case "$1" in
        --prefix) prefix=$2 ;;
        --from) from=$2 ;;
        --build-dir) build_dir=$2 ;;
        --gpu) gpu=$2 ;;
      esac
      shift
      ;;
    --uninstall) mode=uninstall ;;
    --dry-run) dry_run=1 ;;
    --help | -h)
      usage
      exit 0
      ;;
    *) wrong "unknown argument '$1' (see --help)" ;;
  esac
  shift
done
case "$gpu" in auto | yes | no) ;; *) wrong "--gpu is '$gpu', allowed: auto, yes, no" ;; esac
[ -z "$from" ] || [ -z "$build_dir" ] || wrong "--from and --build-dir exclude each other"
[ -z "$from" ] || [ -f "$from" ] || wrong "--from $from: there is no such file"
[ -z "$build_dir" ] || [ -f "$build_dir/cmake_install.cmake" ] || wrong "--build-dir $build_dir: nothing was built there by CMake"

chosen="as given"
here=$(readlink -f "${BASH_SOURCE[0]}")
if [ -z "$prefix" ]; then
  if [ "${here%/versions/*/share/deep_ep/install.sh}" != "$here" ]; then
    prefix=${here%/versions/*}
    chosen="where this script is installed"
  elif [ "$(id -u)" -eq 0 ]; then
    prefix=/opt/deep_ep
    chosen="the default for root"
  else
    [ -n "${HOME:-}" ] || wrong "HOME is not set, so there is no default for --prefix"
    prefix=$HOME/.local/deep_ep
    chosen="the default for a user"
  fi
fi
case "$prefix" in
  *[![:print:]]*) wrong "--prefix has characters that cannot be printed" ;;
  /*) ;;
  *) prefix=$PWD/$prefix ;;
esac
while [ "$prefix" != / ] && [ "${prefix%/}" != "$prefix" ]; do prefix=${prefix%/}; done
[ "$prefix" != / ] || wrong "--prefix / is the whole machine: give deep_ep a folder of its own"

links=(bin lib include share)
staging=
log=
made=()
versions=$prefix/versions

# [n/N] step: ok | failed: reason
number=0
total=0
name=
step() {
  number=$((number + 1))
  name=$1
}
ok() { echo "[$number/$total] $name: ok${1:+: $1}"; }
would() { echo "[$number/$total] $name: would run: $1"; }
failed() {
  trap - EXIT
  clear_staging
  echo "[$number/$total] $name: failed: $1" >&2
  exit 1
}
clear_staging() {
  [ -z "$staging" ] || rm -rf "$staging"
  [ -z "$log" ] || rm -f "$log"
  [ ${#made[@]} -eq 0 ] || rmdir "${made[@]}" 2>/dev/null || true # those that nothing got into
}
# Runs a command; what it says shows only if it fails.
quietly() {
  if ! "$@" >"$log" 2>&1; then
    tail -n 20 "$log" >&2
    return 1
  fi
}

# All files of a tree with their checksums, and all links with their targets: what an uninstall removes.
manifest_of() {
  (
    cd "$1"
    find . -type f ! -path ./.manifest -print0 | sort -z | xargs -0 -r sha256sum
    find . -type l -printf '->%l  %p\n' | sort
  )
}

# Only for the same reader at a time; the lock goes with the process.
lock() {
  exec 9<"$prefix"
  flock -w 60 9 || failed "another installation has been at work in $prefix for a minute"
}

# Removes the files of a manifest, then folders that are empty. What somebody else put there stays.
remove_version() {
  local folder=$1 line file gone=$versions/.staging.deep_ep.gone.$$
  while IFS= read -r line; do
    file=${line#*  }
    case "$file" in ./*) rm -f "$folder/${file#./}" ;; esac
  done <"$folder/.manifest"
  find "$folder" -mindepth 1 -depth -type d -empty -delete
  if [ "$(ls -A "$folder")" = .manifest ]; then
    # Away with its manifest: without one, the next run would take the folder for somebody else's.
    mv -T "$folder" "$gone"
    rm -rf "$gone"
  else
    rm -f "$folder/.manifest"
  fi
}

# Whatever is not in use: older versions, and what an interrupted run left. A folder without a manifest is not ours.
remove_all_but() { # VERSION...
  local folder keep=" $* "
  for folder in "$versions"/* "$versions"/.staging.deep_ep.*; do
    if [ ! -d "$folder" ] || [ -L "$folder" ]; then continue; fi
    case "${folder##*/}" in
      .staging.*) rm -rf "$folder" ;;
      *)
        case "$keep" in *" ${folder##*/} "*) continue ;; esac
        [ ! -f "$folder/.manifest" ] || remove_version "$folder"
        ;;
    esac
  done
}

current_version() {
  local target
  target=$(readlink "$prefix/current" 2>/dev/null) || return 0
  case "$target" in versions/*) echo "${target#versions/}" ;; esac
}
# The one that was in use before: ranks that run on other machines may have its files open, or open them yet.
previous_version() { readlink "$versions/.previous" 2>/dev/null || true; }

# Other programs have a link `current`, too. Ours leads to a version with a manifest, unless somebody removed that.
refuse_foreign_current() {
  local version
  if [ ! -e "$prefix/current" ] && [ ! -L "$prefix/current" ]; then return 0; fi
  version=$(current_version)
  case "$version" in
    "" | */* | .*) ;;
    *) if [ ! -e "$versions/$version" ] || [ -f "$versions/$version/.manifest" ]; then return 0; fi ;;
  esac
  failed "$prefix/current is not deep_ep's: give it a folder of its own by --prefix"
}

# A link in one rename, whatever was there: versions/X for `current`, current/bin for `bin`.
set_link() {
  ln -sfn "$1" "$prefix/.link.deep_ep.$$"
  mv -fT "$prefix/.link.deep_ep.$$" "$prefix/$2"
}

# Is there anything of deep_ep's below the prefix?
is_installed() {
  local file
  for file in "$prefix/current" "$versions"/*/.manifest "$versions"/.staging.deep_ep.*; do
    if [ -e "$file" ] || [ -L "$file" ]; then return 0; fi
  done
  return 1
}

uninstall() {
  total=3
  step "look for an installation in $prefix ($chosen)"
  refuse_foreign_current
  if ! is_installed; then
    ok "nothing is installed there"
    exit 0
  fi
  ok "$(current_version)"
  if [ $dry_run -eq 1 ]; then
    step "remove"
    would "rm $prefix/{${links[*]// /,}} current, and the files that $versions/*/.manifest name"
    exit 0
  fi
  [ -w "$prefix" ] || failed "$prefix belongs to somebody else"
  lock
  step "remove"
  local link
  # The command goes first: from here on nothing half-removed can be started.
  for link in "${links[@]}"; do
    [ "$(readlink "$prefix/$link" || true)" != "current/$link" ] || rm -f "$prefix/$link"
  done
  rm -f "$prefix/current" "$prefix"/.link.deep_ep.*
  remove_all_but
  rm -f "$versions/.previous"
  rmdir "$versions" 2>/dev/null || true
  rmdir "$prefix" 2>/dev/null || true
  ok
  step "look at what is left"
  if [ -d "$prefix" ]; then
    ok "these are not deep_ep's and stay: $(find "$prefix" -mindepth 1 ! -type d | head -n 3 | tr '\n' ' ')"
  else
    ok "nothing"
  fi
  exit 0
}
[ $mode = install ] || uninstall

# ---- Installation -------------------------------------------------------------------------------------------------
source_dir=
if [ -z "$from$build_dir" ]; then
  source_dir=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
  [ -f "$source_dir/CMakePresets.json" ] || wrong "this install.sh is not in a checkout: --from FILE says what to install"
fi

# --gpu auto chooses GPU code by nvcc alone: a machine without a GPU is told what that costs and how to do without.
has_nvcc() {
  [ -x "$source_dir/scripts/cuda_environment" ] && "$source_dir/scripts/cuda_environment" >/dev/null 2>&1 &&
    "$source_dir/scripts/cuda_environment" --remark "./install.sh --gpu no" >/dev/null
}
preset=package
setup=(scripts/setup --install-only)
if [ -n "$source_dir" ] && { [ "$gpu" = yes ] || { [ "$gpu" = auto ] && has_nvcc; }; }; then
  preset=package-cuda
  setup+=(--cuda)
fi
total=6
[ -z "$source_dir" ] || total=8

trap 'clear_staging' EXIT
trap 'echo "install.sh: interrupted; what was installed before is as it was" >&2; exit 1' INT TERM HUP
log=$(mktemp)

step "choose $prefix ($chosen)"
for link in "${links[@]}"; do
  if [ -e "$prefix/$link" ] || [ -L "$prefix/$link" ]; then
    [ "$(readlink "$prefix/$link" || true)" = "current/$link" ] ||
      failed "$prefix/$link is not deep_ep's: give it a folder of its own by --prefix"
  fi
done
refuse_foreign_current
parent=$prefix
while [ ! -d "$parent" ]; do parent=$(dirname "$parent"); done
[ -w "$parent" ] || failed "$parent may not be written by $(id -un): be root, or choose another --prefix"
ok

if [ -n "$source_dir" ]; then
  build_dir=$source_dir/build/$preset
  step "packages to build with"
  if [ $dry_run -eq 1 ]; then
    would "${setup[*]}"
  else
    (cd "$source_dir" && "${setup[@]}") 2>&1 | tee "$log" || failed "$(tail -n 1 "$log")"
    ok
  fi
  step "build (preset $preset)"
  if [ $dry_run -eq 1 ]; then
    would "scripts/build $preset"
  else
    # The longest step by far: a user who watches should know that it goes on.
    [ ! -t 2 ] || echo "compiling, which takes some minutes: tail -f $build_dir.log shows how far it is" >&2
    quietly "$source_dir/scripts/build" "$preset" || failed "see above, and $build_dir.log"
    ok
  fi
fi

# cpack puts the checksum of a package beside it.
step "stage"
if [ -n "$from" ] && [ -f "$from.sha256" ]; then
  read -r wanted _ <"$from.sha256" || true
  [ "$(sha256sum <"$from")" = "${wanted:-}  -" ] || failed "$from does not have the checksum that $from.sha256 names: copy it again"
fi
if [ $dry_run -eq 1 ]; then
  if [ -n "$from" ]; then
    would "tar -xzf $from into $versions/.staging.deep_ep.*"
  else
    would "cmake --install $build_dir --strip --prefix $versions/.staging.deep_ep.*"
  fi
else
  for folder in "$versions" "$prefix"; do
    [ -e "$folder" ] || made+=("$folder")
  done
  mkdir -p "$versions" || failed "cannot make $versions"
  lock
  before=$(current_version)
  previous=$(previous_version)
  remove_all_but "$before" "$previous"
  staging=$(mktemp -d "$versions/.staging.deep_ep.XXXXXX") || failed "cannot write into $versions"
  chmod 755 "$staging"
  if [ -n "$from" ]; then
    quietly tar -xzf "$from" --no-same-owner --strip-components=1 -C "$staging" || failed "$from is no package of deep_ep"
  else
    quietly cmake --install "$build_dir" --strip --prefix "$staging" || failed "nothing whole is built in $build_dir"
  fi
  [ -x "$staging/bin/deep_ep" ] || failed "bin/deep_ep is not in ${from:-$build_dir}: it is no package of deep_ep"
  ok "$(du -sh "$staging" | cut -f1)"
fi

# check FOLDER: does what lies there run?
check() {
  local status=0
  "$1/bin/deep_ep" --version >"$log" 2>&1 || { head -n 3 "$log" && return 1; }
  # A layer on two ranks, every result compared: the kernels run on this machine's CPU.
  "$1/bin/deep_ep" demo --tokens 64 --hidden 256 --ranks 2 >"$log" 2>&1 ||
    { echo "the check on two ranks failed: $(tail -n 1 "$log")" && return 1; }
  # 1: it ran and found something about RDMA, which is no matter of the installation.
  "$1/bin/deep_ep" doctor --json >"$log" 2>&1 || status=$?
  [ $status -le 1 ] || { echo "the doctor ended with status $status: $(tail -n 1 "$log")" && return 1; }
  [ $status -eq 0 ] || echo "the doctor has something to say about this machine: deep_ep doctor"
}

step "check what is staged"
if [ $dry_run -eq 1 ]; then
  would "deep_ep --version, deep_ep demo on two ranks, deep_ep doctor"
else
  said=$(check "$staging") || failed "$said"
  version=$("$staging/bin/deep_ep" --version)
  version=${version%%$'\n'*}
  case "$version" in *[!A-Za-z0-9.+~-]* | "" | .*) failed "'$version' is no version" ;; esac
  ok "$version${said:+; $said}"
fi

# Does this version, or the empty word, hold what is staged, and undamaged?
same_as_staged() {
  [ -n "$1" ] && cmp -s "$log" "$versions/$1/.manifest" && (cd "$versions/$1" && manifest_of . | cmp -s - .manifest)
}

step "take over"
if [ $dry_run -eq 1 ]; then
  would "mv the staged folder to $versions/VERSION, and $prefix/current to it"
else
  manifest_of "$staging" >"$log"
  if same_as_staged "$before"; then
    rm -rf "$staging"
    ok "$version is installed already, and unchanged"
  else
    id=$previous
    if same_as_staged "$previous"; then
      rm -rf "$staging"
    else
      cp "$log" "$staging/.manifest"
      id=$version
      for ((i = 2; ; ++i)); do
        [ -e "$versions/$id" ] || break
        id=$version.$i
      done
      mv -T "$staging" "$versions/$id"
    fi
    [ -z "$before" ] || set_link "$before" versions/.previous
    set_link "versions/$id" current
    ok "$id"
  fi
  staging=
  for link in "${links[@]}"; do
    [ "$(readlink "$prefix/$link" || true)" = "current/$link" ] || set_link "current/$link" "$link"
  done
fi

step "check what is installed"
if [ $dry_run -eq 1 ]; then
  would "$prefix/bin/deep_ep --version, demo, doctor; should one fail, the version before comes back"
else
  if ! said=$(check "$prefix"); then
    [ -z "$before" ] || set_link "versions/$before" current
    [ -z "$previous" ] || set_link "$previous" versions/.previous
    failed "$said${before:+; $before is in use again}"
  fi
  ok "$prefix/bin/deep_ep"
fi

step "clear away older versions"
if [ $dry_run -eq 1 ]; then
  would "rm the files that the other $versions/*/.manifest name"
  echo "Nothing was changed (--dry-run)."
else
  previous=$(previous_version)
  remove_all_but "$(current_version)" "$previous"
  rm -f "$prefix"/.link.deep_ep.*
  ok "${previous:+$previous stays for what still runs from it}"
  case ":$PATH:" in
    *":$prefix/bin:"*) ;;
    *) echo "To have the command at hand: export PATH=\"$prefix/bin:\$PATH\"" ;;
  esac
fi
