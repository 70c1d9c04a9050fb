#!/usr/bin/env bash
# What cpack makes of a build folder: contents, dependencies, run-time paths; the .deb's files run from another root, and
# a project is built against the tarball that install.sh installed.
# shellcheck disable=SC2016 # $ORIGIN stands in the files
# usage: package_test.sh SOURCE_DIR BUILD_DIR CXX
set -euo pipefail
source_dir=$1
build_dir=$2
cxx=$3
for tool in dpkg-deb dpkg-shlibdeps readelf pkg-config; do
  command -v $tool >/dev/null || { echo "SKIPPED: $tool is not installed" && exit 77; }
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export HOME=$work TMPDIR=$work
fail() {
  echo "FAILED: $1" >&2
  exit 1
}

# scripts/package hands the commit of sources without .git to CMake, before it builds; stand-ins build nothing here.
tree=$work/tree
mkdir -p "$tree/scripts" "$tree/stubs"
cp "$source_dir/scripts/package" "$tree/scripts/"
printf '#!/bin/sh\n' >"$tree/scripts/setup"
printf '#!/bin/sh\nexit 1\n' >"$tree/scripts/cuda_environment"
cat >"$tree/scripts/build" <<'STUB'
#!/bin/sh
echo "build $*" >>calls
mkdir -p "build/$1"
[ -e "build/$1/CMakeCache.txt" ] || echo DEEP_EP_GIT_HASH:STRING= >"build/$1/CMakeCache.txt"
STUB
printf '#!/bin/sh\necho "cmake $*" >>calls\n' >"$tree/stubs/cmake"
printf '#!/bin/sh\nmkdir -p build/packages.new && touch build/packages.new/x.tar.gz build/packages.new/x.deb\n' >"$tree/stubs/cpack"
chmod +x "$tree"/scripts/* "$tree"/stubs/*
calls_of() { # ARGUMENT...
  rm -f "$tree/calls"
  PATH=$tree/stubs:$PATH "$tree/scripts/package" "$@" >"$work/log" 2>&1 || { cat "$work/log" && fail "scripts/package $*"; }
  tr '\n' ';' <"$tree/calls"
}
plain="build package deep_ep_build_info;build package;"
with_commit="build package deep_ep_build_info;cmake -DDEEP_EP_GIT_HASH=0123abc build/package;build package;"
[ "$(calls_of)" = "$plain" ] || fail "scripts/package: $(calls_of)"
[ "$(calls_of --gpu no --commit "")" = "$plain" ] || fail "without a commit: $(calls_of --gpu no --commit "")"
[ "$(calls_of --commit 0123abc)" = "$with_commit" ] || fail "with a commit: $(calls_of --commit 0123abc)"
for arguments in "--commit" "--commit a;b" "--gpu maybe" "-x"; do
  status=0
  IFS=' ' read -r -a words <<<"$arguments"
  "$tree/scripts/package" "${words[@]}" >"$work/log" 2>&1 || status=$?
  [ $status -eq 2 ] || fail "scripts/package $arguments ended with $status"
done
cmake -D GIVEN=0123abc -D "SOURCE_DIR=$tree" -D "OUTPUT=$work/info.hpp" -P "$source_dir/cmake/build_info.cmake"
grep -qx '#define DEEP_EP_GIT_HASH "0123abc"' "$work/info.hpp" || fail "the commit is not in the header"

cpack --config "$build_dir/CPackConfig.cmake" -B "$work/packages" >"$work/log" 2>&1 || { cat "$work/log" && exit 1; }
tarball=$(echo "$work"/packages/*.tar.gz)
deb=$(echo "$work"/packages/*.deb)
version=$("$build_dir/bin/deep_ep" --version | sed -n '1s/-g.*//p')
case "${tarball##*/}" in deep_ep-"$version"-Linux-*.tar.gz) ;; *) fail "the tarball is called $tarball" ;; esac
(cd "$work/packages" && sha256sum --quiet -c ./*.sha256)

# Both hold the same things, but for the libraries that the .deb depends on.
tar -tzf "$tarball" | grep -v '/$' | sed 's|^[^/]*/||' | grep -Ev '^lib/lib(fmt|boost_context)\.' | sort >"$work/in_tarball"
dpkg-deb --fsys-tarfile "$deb" | tar -t | grep -v '/$' | sed 's|^\./usr/||' | sort >"$work/in_deb"
diff "$work/in_tarball" "$work/in_deb" || fail "the packages differ"
for file in bin/deep_ep lib/libdeep_ep.so include/deep_ep/buffer.hpp include/deep_ep/version.hpp \
  lib/cmake/deep_ep/deep_ep-config.cmake lib/pkgconfig/deep_ep.pc share/deep_ep/install.sh share/doc/deep_ep/LICENSE; do
  grep -qx "$file" "$work/in_deb" || fail "$file is not in the packages"
done
! grep -Ev '^(bin|lib|include/deep_ep|share/deep_ep|share/doc/deep_ep)/' "$work/in_deb" || fail "this belongs elsewhere"

# Dependencies are those of the files, by dpkg-shlibdeps; rdma-core is opened at run time.
dpkg-deb -f "$deb" >"$work/control"
commit=$("$build_dir/bin/deep_ep" --version | sed -n '1s/.*-g\(.*\)/+g\1/p')
grep -qx "Version: $version${commit//-/.}" "$work/control" || { cat "$work/control" && fail "the version of the .deb is not $version${commit//-/.}"; }
case "${deb##*/}" in deep-ep_"$version"_*.deb) ;; *) fail "the .deb is called $deb" ;; esac
for package in libc6 libstdc++6 libgcc-s1; do
  sed -n 's/^Depends: //p' "$work/control" | sed 's/, /\n/g; s/ ([^)]*)//g' | grep -Fx "$package" >"$work/log" || { cat "$work/control" && fail "no dependency on $package"; }
done
! grep -q '^Depends:.*ibverbs' "$work/control" || fail "the .deb depends on libibverbs"
grep -q '^Recommends: libibverbs1' "$work/control" || fail "libibverbs1 is not recommended"
! dpkg-deb --ctrl-tarfile "$deb" | tar -t | grep -E 'postinst|preinst|prerm|postrm' || fail "the .deb runs scripts"

# Out of the .deb into another root: run-time paths are relative, so it runs from there.
dpkg-deb -x "$deb" "$work/image"
for file in "$work"/image/usr/bin/deep_ep "$work"/image/usr/lib/*.so; do
  path=$(readelf -d "$file" | sed -n 's/.*runpath: \[\(.*\)\]/\1/p')
  case "$path" in '$ORIGIN'*) ;; *) fail "$file has the run-time path '$path'" ;; esac
  ! tr ':' '\n' <<<"$path" | grep -E "^($build_dir|$source_dir|/home|/tmp)" || fail "$file looks for libraries in the build folder"
done
[ "$("$work/image/usr/bin/deep_ep" --version)" = "$("$build_dir/bin/deep_ep" --version)" ] || fail "another version"
"$work/image/usr/bin/deep_ep" demo --input "$source_dir/LICENSE" --tokens 32 --hidden 256 --ranks 2 >"$work/log" || { cat "$work/log" && fail "the demo failed"; }
grep -q '^OK: ' "$work/log" || { cat "$work/log" && fail "the demo does not say OK"; }

# The tarball by install.sh, a project against it, and away again.
prefix=$work/prefix
"$source_dir/install.sh" --from "$tarball" --prefix "$prefix" >"$work/log" || { cat "$work/log" && exit 1; }
grep -q '^\[6/6\] ' "$work/log" || fail "install.sh ended early"
"$prefix/bin/deep_ep" env >"$work/log" || { cat "$work/log" && fail "deep_ep env"; }
grep -q "^DEEP_EP_TIMEOUT_S = " "$work/log" || { cat "$work/log" && fail "deep_ep env lacks DEEP_EP_TIMEOUT_S"; }
flags=$(PKG_CONFIG_PATH=$prefix/lib/pkgconfig pkg-config --cflags --libs deep_ep)
# shellcheck disable=SC2086 # they are several words
"$cxx" -std=c++20 "$source_dir/tests/install/consumer/consumer.cpp" -o "$work/consumer" $flags
"$work/consumer" >"$work/log" || fail "the consumer failed"
grep -q "^deep_ep $version: tokens per expert 2 1 1 1$" "$work/log" || { cat "$work/log" && fail "the consumer says otherwise"; }
"$source_dir/install.sh" --uninstall --prefix "$prefix" >"$work/log"
[ ! -e "$prefix" ] || fail "uninstalling left $(find "$prefix")"
echo "both packages are whole"
