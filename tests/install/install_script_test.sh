#!/usr/bin/env bash
# install.sh with packages that are a few lines of shell: idempotent, atomic, and nothing left behind.
# usage: install_script_test.sh SOURCE_DIR
# shellcheck disable=SC2016 # what is in single quotes is for the scripts that are written
set -euo pipefail
install=$1/install.sh
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'echo "FAILED at line $LINENO; the last output was:" >&3; cat "$work/out" >&3' ERR
cd "$work"
export HOME=$work/home TMPDIR=$work
mkdir home

exec 3>&2
fail() {
  echo "FAILED: $1" >&3
  exit 1
}
expect() { grep -Eq -- "$2" "$1" || { cat "$1" && fail "no line in $1 matches '$2'"; }; }
refuses() { # STATUS PATTERN ARGUMENT...
  local status=0 wanted=$1 pattern=$2
  shift 2
  "$install" "$@" >out 2>&1 || status=$?
  [ "$status" -eq "$wanted" ] || { cat out && fail "'$*' ended with $status, not $wanted"; }
  expect out "$pattern"
}
tree() { (cd "$1" && find . -printf '%p %l\n' | sort && find . -type f -print0 | sort -z | xargs -0 -r sha256sum); }

# package NAME VERSION [BODY]: a tarball whose deep_ep is a script.
package() {
  mkdir -p "$1/bin" "$1/lib/pkgconfig" "$1/include/deep_ep" "$1/share/deep_ep"
  printf '#!/bin/sh\nif [ "$1" = --version ]; then echo %s; echo "  more"; fi\n%s\n' "$2" "${3:-exit 0}" >"$1/bin/deep_ep"
  chmod +x "$1/bin/deep_ep"
  echo "$2" >"$1/lib/a file with spaces.so.1"
  ln -s "a file with spaces.so.1" "$1/lib/libx.so"
  echo "of $2" >"$1/include/deep_ep/only-in-$2.hpp"
  cp "$install" "$1/share/deep_ep/install.sh"
  tar -czf "$1.tar.gz" "$1"
}
package zero 0.9-gaaa
package one 1.0-gabc
package two 2.0-gdef
package broken 3.0-gbad '[ "$1" != demo ] || { echo "wrong sums"; exit 1; }'
package halfway 4.0-gbad 'case "$0" in */.staging.*) exit 0 ;; esac; [ "$1" != demo ] || { echo "not here"; exit 1; }'
echo nonsense >nonsense.tar.gz

# The command line.
refuses 2 "unknown argument '--x'" --x
refuses 2 "--gpu is 'maybe', allowed: auto, yes, no" --gpu maybe
refuses 2 "--from /nonexistent: there is no such file" --from /nonexistent
refuses 2 "--prefix: its value is missing" --prefix
refuses 2 "whole machine" --prefix // --from one.tar.gz
refuses 1 "stage: failed: .*nonsense.tar.gz is no package" --from nonsense.tar.gz --prefix "$work/p"
[ ! -e p ] || fail "a failed installation leaves a folder"

# The checksum that lies beside a package is compared; a package without one is taken as it is.
(cd "$work" && sha256sum nonsense.tar.gz | sed 's/nonsense/one/' >one.tar.gz.sha256)
refuses 1 "stage: failed: one.tar.gz does not have the checksum that one.tar.gz.sha256 names" --from one.tar.gz --prefix "$work/p"
: >one.tar.gz.sha256
refuses 1 "stage: failed: one.tar.gz does not have the checksum" --from one.tar.gz --prefix "$work/p"
[ ! -e p ] || fail "a package with another checksum was installed"
sha256sum one.tar.gz >one.tar.gz.sha256

# A dry run says every step and changes nothing.
"$install" --dry-run --from one.tar.gz --prefix "$work/p" >out
[ ! -e p ] || fail "--dry-run made something"
for n in 1 2 3 4 5 6; do expect out "^\[$n/6\] "; done
"$install" --dry-run --gpu no --prefix "$work/p" >out
expect out '^\[2/8\] packages to build with: would run: scripts/setup --install-only$'
expect out '^\[3/8\] build \(preset package\): would run: scripts/build package$'
[ ! -e p ] || fail "--dry-run made something"

# With nvcc and without a GPU it says at once that GPU code takes long, and how to do without.
if ! compgen -G '/dev/nvidia[0-9]*' >/dev/null; then # it is for machines without a GPU
  mkdir compiler
  printf '#!/bin/sh\n' >compiler/nvcc
  chmod +x compiler/nvcc
  for choice in "" "--gpu yes" "--gpu no"; do
    # shellcheck disable=SC2086  # two words
    CUDACXX=$work/compiler/nvcc "$install" --dry-run $choice --prefix "$work/p" >out 2>&1
    if [ -z "$choice" ]; then
      head -n 1 out | grep 'nvcc is here, but no GPU.* ./install.sh --gpu no leaves it out' >/dev/null || fail "GPU code is compiled unasked: $(cat out)"
    elif grep -q 'no GPU' out; then
      fail "$choice: it says what was asked for: $(cat out)"
    fi
  done
fi

# Twice the same: the second changes nothing, and says so.
"$install" --from one.tar.gz --prefix "$work/p" >out
expect out "^\[6/6\] clear away older versions: ok$"
expect out 'export PATH='
[ "$(p/bin/deep_ep --version | sed -n 1p)" = 1.0-gabc ] || fail "it does not run"
tree p >first
"$install" --from one.tar.gz --prefix "$work/p" >out
expect out "installed already, and unchanged"
tree p | diff first - || fail "the second time changed something"

# A damaged installation is made whole by the same package.
echo damage >>p/lib/libx.so
"$install" --from one.tar.gz --prefix "$work/p" >out
[ "$(cat p/lib/libx.so)" = 1.0-gabc ] || fail "the damage is still there"

# An upgrade replaces all; what is wrong with a new version leaves the old one in use. The version before it stays, whole,
# for ranks that still run from it; older ones go.
versions() { find p/versions -mindepth 1 -maxdepth 1 -printf '%f ' | tr ' ' '\n' | sort | tr '\n' ' '; }
"$install" --from two.tar.gz --prefix "$work/p" >out
[ "$(p/bin/deep_ep --version | sed -n 1p)" = 2.0-gdef ] || fail "the new version is not in use"
[ ! -e p/include/deep_ep/only-in-1.0-gabc.hpp ] || fail "a file of the old version is still there"
[ "$(versions)" = ".previous 1.0-gabc.2 2.0-gdef " ] || fail "these versions are there: $(versions)"
[ "$(readlink p/versions/.previous)" = 1.0-gabc.2 ] || fail "another one is the previous one"
[ "$(p/versions/1.0-gabc.2/bin/deep_ep --version | sed -n 1p)" = 1.0-gabc ] || fail "the previous version is not whole"
expect out "clear away older versions: ok: 1.0-gabc.2 stays"
tree p >second
refuses 1 "check what is staged: failed: .*wrong sums" --from broken.tar.gz --prefix "$work/p"
tree p | diff second - || fail "a broken package changed the installation"
refuses 1 "check what is installed: failed: .*not here; 2.0-gdef is in use again" --from halfway.tar.gz --prefix "$work/p"
[ "$(p/bin/deep_ep --version | sed -n 1p)" = 2.0-gdef ] || fail "the old version is not back"
"$install" --from two.tar.gz --prefix "$work/p" >out
tree p | diff second - || fail "the same again removed the previous version, or kept the one that failed"
# Back to the previous one: it is still there, and nothing is copied.
inode=$(stat -c %i p/versions/1.0-gabc.2/bin/deep_ep)
"$install" --from one.tar.gz --prefix "$work/p" >out
[ "$(stat -Lc %i p/bin/deep_ep)" = "$inode" ] || fail "it was copied again"
[ "$(readlink p/versions/.previous)" = 2.0-gdef ] || fail "another one is the previous one"

# Killed before each command that changes something: the old version runs, and the next run leaves the same tree as if nothing had been.
mkdir stubs
for command in mkdir mktemp tar chmod cp mv ln rm; do
  real=$(command -v $command)
  cat >stubs/$command <<STUB
#!/bin/sh
echo "$command \$*" >>"$work/count"
if [ "\$(wc -l <"$work/count")" -ge "\$KILL_AT" ]; then kill -KILL "\$(cat "$work/pid")"; exit 1; fi
exec $real "\$@"
STUB
  chmod +x stubs/$command
done
# Killed while it takes over: one is in use, zero was before.
afresh() {
  for name in zero one; do "$install" --from $name.tar.gz --prefix "$work/p" >out; done
}
"$install" --uninstall --prefix "$work/p" >out
[ ! -e p ] || fail "the previous version is left"
afresh
tree p >first
kills=0
for ((at = 1; ; ++at)); do
  : >count
  status=0
  (
    export KILL_AT=$at PATH="$work/stubs:$PATH"
    exec sh -c 'echo $$ >"$0"; exec "$@"' "$work/pid" "$install" --from two.tar.gz --prefix "$work/p"
  ) >out 2>&1 || status=$?
  version=$(p/bin/deep_ep --version | sed -n 1p) || fail "killed at command $at, nothing runs"
  case $version in 1.0-gabc | 2.0-gdef) ;; *) fail "killed at command $at, it says '$version'" ;; esac
  [ -e p/include/deep_ep/only-in-"$version".hpp ] || fail "killed at command $at, versions are mixed"
  [ $status -ne 0 ] || break
  kills=$((kills + 1))
  # Every run starts from the old version, and from what the one before left.
  [ "$version" = 1.0-gabc ] || afresh
done 2>/dev/null
[ $kills -gt 12 ] || fail "only $kills commands were cut off"
[ "$(versions)" = ".previous 1.0-gabc 2.0-gdef " ] || fail "these versions are there: $(versions)"
afresh
tree p | diff first - || fail "something of the killed runs is left"

# Uninstalling removes what was installed, and no more; by the installed copy as well, and as often as one likes.
echo mine >p/lib/mine.txt
"$install" --dry-run --uninstall --prefix "$work/p" >out
[ -x p/bin/deep_ep ] || fail "--dry-run --uninstall removed something"
p/share/deep_ep/install.sh --uninstall >out
expect out "these are not deep_ep's and stay: .*mine.txt"
[ "$(find p ! -type d)" = p/versions/1.0-gabc/lib/mine.txt ] || fail "more or less than mine.txt is left"
rm -r p
"$install" --uninstall --prefix "$work/p" >out
expect out "nothing is installed there"

# A folder of others is refused and stays.
mkdir -p shared/bin
echo other >shared/bin/tool
refuses 1 "shared/bin is not deep_ep's" --from one.tar.gz --prefix "$work/shared"
[ "$(find shared ! -type d)" = shared/bin/tool ] || fail "it left something in another's folder"

# So are a link `current` that leads elsewhere, and folders in a `versions` that others made.
mkdir -p app/releases/7 app/versions
ln -s releases/7 app/current
mkdir -p app2/versions/1/empty app2/versions/.staging.x app2/versions/none
ln -s versions/1 app2/current
mkdir -p app3/versions/1/empty app3/versions/.staging.x
ln -s 1 app3/versions/latest
for app in app app2 app3; do tree $app >$app.before; done
for app in app app2; do
  refuses 1 "$app/current is not deep_ep's" --from one.tar.gz --prefix "$work/$app"
  refuses 1 "$app/current is not deep_ep's" --uninstall --prefix "$work/$app"
  tree $app | diff $app.before - || fail "it changed another's folder"
done
"$install" --uninstall --prefix "$work/app3" >out
expect out "nothing is installed there"
tree app3 | diff app3.before - || fail "it changed another's folder"
"$install" --from one.tar.gz --prefix "$work/app3" >out
"$install" --from two.tar.gz --prefix "$work/app3" >out
"$install" --uninstall --prefix "$work/app3" >out
tree app3 | diff app3.before - || fail "it removed folders of others"

# Defaults: a user's own folder needs no root.
if [ "$(id -u)" -eq 0 ] && command -v setpriv >/dev/null; then
  chmod 755 "$work" && chmod 777 "$HOME"
  setpriv --reuid 65534 --regid 65534 --clear-groups env TMPDIR="$HOME" "$install" --from one.tar.gz >out
  expect out "^\[1/6\] choose $HOME/.local/deep_ep \(the default for a user\): ok$"
  setpriv --reuid 65534 --regid 65534 --clear-groups env TMPDIR="$HOME" "$install" --uninstall >out
  [ ! -e "$HOME/.local/deep_ep" ] || fail "something is left of the user's"
fi
echo "install.sh: killed at $kills commands, always one whole version"
